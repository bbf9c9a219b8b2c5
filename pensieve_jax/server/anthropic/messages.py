"""The routes POST /v1/messages and /v1/messages/count_tokens.

Owns: the steps of a message, and its response, whole and as a stream of events.
Does not know: how a context is resolved, how turns run, or the form of blocks and errors.

A client sends all messages of a conversation each time, as to Chat Completions, and finds the same KV cache.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError, PensieveError
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import MESSAGES, SamplingParams, taken_fields
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.server.anthropic.context import context_of
from pensieve_jax.server.anthropic.errors import error_body, error_reply
from pensieve_jax.server.anthropic.models import VERSION_HEADER
from pensieve_jax.server.anthropic.reply import (
    MESSAGE_STOP,
    NOT_ENDED,
    PING,
    BlockEvents,
    content_of,
    ending_of,
    message_object,
    named_event,
    token_counts,
    usage_of,
)
from pensieve_jax.server.anthropic.schemas import ContextFields, CountTokensBody, MessagesBody
from pensieve_jax.server.anthropic.template import asked_form, choice_of, effort_of, template_input_of
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.errors import ApiError, as_api_error, invalid_value
from pensieve_jax.server.http.replies import Events, HttpResponse, encode_json, event, json_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.turns.checks import check_model
from pensieve_jax.server.turns.idempotency import KeyedRequest, keyed_request
from pensieve_jax.server.turns.items import reply_id
from pensieve_jax.server.turns.message_turns import MessageTurns, stores_turns
from pensieve_jax.server.turns.run import ReplyTurns, merged, takes_long
from pensieve_jax.server.turns.sampling import sampling_params
from pensieve_jax.server.turns.structured import AskedForm
from pensieve_jax.server.turns.template import ignores_effort
from pensieve_jax.server.turns.tool_choice import error_of_calls, form_fields, with_choice
from pensieve_jax.server.workers import run_cpu
from pensieve_jax.text.replies import call_id, new_parser
from pensieve_jax.text.reply_forms import with_form
from pensieve_jax.text.reply_parser import ReplyParser

_VERSIONS: Final = ("2023-06-01", "2026-10-21")
"""Versions of the API. The second one differs in what it refuses; this server takes the fields of both."""


async def create_message(call: HttpRequest) -> HttpResponse:
    """Answer a list of messages with the next one."""
    _check_version(call)
    body = await call.decode(MessagesBody)
    check_model(call.services, body.model)
    keyed = await keyed_request(call, stores=stores_turns(call.services, None))
    call.charge_stream(body.stream)
    form = await asked_form(call, body)
    message = await call.run_cpu(NewMessage, call, body, form, keyed)
    running = await message.start()
    if body.stream:
        settings = call.services.settings
        return Events(
            message.events(running),
            heartbeat_s=settings.heartbeat_s,
            on_end=running.close,
            heartbeat=PING,
        )
    try:
        return json_reply(await message.whole(running))
    finally:
        await running.close()


async def count_tokens(call: HttpRequest) -> HttpResponse:
    """Answer a list of messages with the number of tokens of their context."""
    _check_version(call)
    body = await call.decode(CountTokensBody)
    check_model(call.services, body.model)
    context = await call.run_cpu(MessageContext, call, body)
    return json_reply({"input_tokens": await context.num_tokens()})


ROUTES: Final = (
    Route("POST", "/v1/messages", create_message, takes_key=True, error_reply=error_reply),
    Route("POST", "/v1/messages/count_tokens", count_tokens, error_reply=error_reply),
)


def _check_version(call: HttpRequest) -> None:
    """Raise ApiError for a version of the API with other forms; names of betas alone change nothing."""
    version = call.headers.get(VERSION_HEADER)
    if version is not None and version not in _VERSIONS:
        sentence = f"{VERSION_HEADER} is {version[:20]!r}; it must be {' or '.join(_VERSIONS)}."
        raise invalid_value(VERSION_HEADER, sentence)


class MessageContext:
    """The context of one request."""

    _form_fields: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        call: HttpRequest,
        body: ContextFields,
        keyed: KeyedRequest | None = None,
        form: StructuredOutput | None = None,
    ) -> None:
        """Check the decoded body as a whole; raise ApiError. `form` is that of the reply."""
        body.check()
        context = context_of(body)
        chat_format = call.services.chat_format
        call.notes.ignored_fields += context.ignored
        if ignores_effort(chat_format, effort_of(body)):
            call.notes.ignored_fields += ("output_config.effort",)
        self._context, self._num_messages = context, len(body.messages)
        try:
            self._choice = choice_of(body, context)
            template_input = template_input_of(body, context, chat_format, self._choice)
            template_input = with_form(template_input, form)
        except InvalidRequestError as error:
            raise self._as_api_error(error) from error
        self._turns = MessageTurns(
            call, context.messages, template_input=template_input, paths=context.paths, keyed=keyed
        )

    async def num_tokens(self) -> int:
        """Return the number of tokens; raise ApiError."""
        try:
            return await self._turns.num_context_tokens()
        except InvalidRequestError as error:
            raise self._as_api_error(error) from error

    def _as_api_error(self, error: BaseException) -> ApiError:
        """Return the error response for an exception, with the client's names of fields."""
        fields = {"prompt": "messages", "stop": "stop_sequences"}
        fields |= {"structured.prefill": f"messages[{self._num_messages - 1}].content", **self._form_fields}
        for index in range(len(self._context.tools)):
            fields[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
            fields[f"tools[{index}].function"] = f"tools[{index}]"
        for index, path in enumerate(self._context.paths):
            fields[f"messages[{index}].tool_call_id"] = f"{path}.tool_use_id"
            fields[f"messages[{index}]"] = path
        return as_api_error(error, fields)


class NewMessage(MessageContext):
    """One message to create, from its context to its response."""

    def __init__(
        self, call: HttpRequest, body: MessagesBody, asked: AskedForm, keyed: KeyedRequest | None = None
    ) -> None:
        """Check the decoded body as a whole; raise ApiError. `asked` is the form of its reply."""
        super().__init__(call, body, keyed, asked.form)
        self._body = body
        self._services = call.services
        self._wait = call.unless_gone
        self._request_id = call.notes.request_id
        self._form = asked.form
        self._form_fields = form_fields(self._choice, asked)
        self._owner = call.owner
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"

    async def start(self) -> ReplyTurns:
        """Wait for a ticket and submit the turn; raise ApiError."""
        try:
            return await self._turns.start(self._params, max_tokens=self._body.max_tokens)
        except InvalidRequestError as error:
            tools = self._turns.template_input.tools
            raise self._as_api_error(error_of_calls(error, self._form_fields, tools, self._choice)) from error

    async def whole(self, running: ReplyTurns) -> dict[str, Any]:
        """Wait for the reply and return the message; raise its failure."""
        try:
            (output,) = await self._wait(running.results())
        except InvalidRequestError as error:
            raise self._as_api_error(error) from error
        await self._turns.record_usage([output])
        return await run_cpu(self._owner, takes_long([output]), self._message, output)

    async def events(self, running: ReplyTurns) -> AsyncGenerator[bytes]:
        """Yield the events of the reply; a failure becomes an error event.

        The first event has the tokens that are expected in the cache, the last ones those that were there.
        """
        context = self._turns.contexts[0]
        counts = token_counts(len(context.prompt_token_ids), context.keep) | {"output_tokens": 0}
        yield named_event("message_start", message=self._object([], NOT_ENDED, counts))
        parser, blocks = self._parser(), BlockEvents(self._call_id, shows_thinking=self._shows_thinking)
        try:
            async with aclosing(merged(running.turns)) as deltas:
                async for _, delta in deltas:
                    pieces = parser.end() if delta is None else parser.feed(delta.text)
                    for data in blocks.feed(pieces):
                        yield data
        except (ApiError, PensieveError) as error:
            body = error_body(self._as_api_error(error), self._request_id)
            yield event(encode_json(body), "error")
            return
        for data in blocks.close():
            yield data
        output = running.turns[0].output
        assert output is not None
        await self._turns.record_usage([output])
        yield named_event("message_delta", delta=self._ending(output, parser), usage=usage_of(output.usage))
        yield MESSAGE_STOP

    # Private methods

    def _params(self, room: int) -> list[SamplingParams]:
        """Return the parameters of the turn; the engine shortens a reply that has no `room`."""
        body = self._body
        given = {name: getattr(body, name) for name in taken_fields(MESSAGES)} | {"stop": body.stop_sequences}
        params = sampling_params(self._services.defaults, given, max_tokens=body.max_tokens)
        params = replace(params, structured=self._form)
        template = self._turns.contexts[0].template_input
        return [with_choice(params, template, self._choice, self._services.chat_format)]

    def _message(self, output: Output) -> dict[str, Any]:
        """Return the message of a whole reply."""
        parser = self._parser()
        events = [*parser.feed(output.text), *parser.end()]
        content = content_of(events, self._call_id, shows_thinking=self._shows_thinking)
        return self._object(content, self._ending(output, parser), usage_of(output.usage))

    def _parser(self) -> ReplyParser:
        return new_parser(self._turns.contexts[0].template_input)

    def _call_id(self, index: int, header: str) -> str:
        context = self._turns.contexts[0]
        return call_id(context.node.turn_id, index, row=context.template_input.reply.calls, header=header)

    def _ending(self, output: Output, parser: ReplyParser) -> dict[str, Any]:
        stop = self._body.stop_sequences or ()
        return ending_of(output, self._body.max_tokens, stop, calls_tools=parser.num_calls > 0)

    def _object(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        message_id = reply_id(self._turns.contexts[0].node.turn_id)
        return message_object(message_id, self._services.model_name, content, ending, usage)
