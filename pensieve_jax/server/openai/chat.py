"""The route POST /v1/chat/completions.

Owns: the steps of a chat completion, and the form of its response, whole and in chunks.
Does not know: how a context is resolved, or how turns run. Called by the application.

A client sends all messages of a conversation each time. The resolver finds the turn that they continue from,
so the engine computes only new tokens. Turns stay in the engine's memory; they are also stored in the history
if the request has `store` or the server's `chat_history` is "durable".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.outputs import Output, TokenLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.errors import as_api_error
from pensieve_jax.server.http.long_json import EncodedList
from pensieve_jax.server.http.replies import HttpResponse, encode_json
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.openai.completion_stream import reply_in
from pensieve_jax.server.openai.prompt_logprobs import (
    check_not_streamed,
    prompt_logprobs_field,
    scored_by_the_first,
)
from pensieve_jax.server.openai.schemas import ChatBody, rendering
from pensieve_jax.server.turns.checks import check_metadata, check_model
from pensieve_jax.server.turns.idempotency import KeyedRequest, keyed_request
from pensieve_jax.server.turns.message_turns import MessageTurns, stores_turns
from pensieve_jax.server.turns.run import ReplyTurns
from pensieve_jax.server.turns.sampling import choice_params
from pensieve_jax.server.turns.structured import AskedForm, asked_form
from pensieve_jax.server.turns.template import ignores_effort
from pensieve_jax.server.turns.tool_choice import error_of_calls, form_fields, with_calls, with_choice
from pensieve_jax.text.messages import message_call
from pensieve_jax.text.replies import ReplyParts, call_id, has_parts, message_of, new_parser
from pensieve_jax.text.reply_events import (
    ArgumentText,
    CallBegun,
    CallEnded,
    ContentText,
    ReasoningText,
    ReplyEvent,
)
from pensieve_jax.text.reply_forms import with_form


async def create_chat_completion(call: HttpRequest) -> HttpResponse:
    """Answer a list of messages with one or more replies."""
    body = await call.decode(ChatBody)
    check_model(call.services, body.model)
    keyed = await keyed_request(
        call,
        stores=stores_turns(call.services, body.store),
        num_replies=body.num_choices,
        has_scores="prompt_logprobs" if body.prompt_logprobs is not None else None,
    )
    call.charge_stream(body.stream)
    form = await asked_form(call, body)
    completion = await call.run_cpu(ChatCompletion, call, body, form, keyed)
    return await reply_in(completion, call, body, await completion.start())


ROUTES = [Route("POST", "/v1/chat/completions", create_chat_completion, takes_key=True)]


class ChatCompletion:
    """One chat completion request, from its messages to its response. It is a `WireFormat`."""

    def __init__(
        self, call: HttpRequest, body: ChatBody, asked: AskedForm, keyed: KeyedRequest | None = None
    ) -> None:
        """Check the decoded body as a whole; raise ApiError. `asked` is the form of its replies."""
        self._choice = body.choice()
        self.fields: Final = {
            **{"prompt": "messages", "logprobs": "top_logprobs"},
            "structured.prefill": f"messages[{len(body.messages) - 1}].content",
            **form_fields(self._choice, asked),
        }
        self._form = asked.form
        self._services = call.services
        self._body = body
        check_metadata(body.metadata)
        messages, template_input = rendering(
            body, body.messages, call.services.chat_format, body.reasoning_effort
        )
        if ignores_effort(call.services.chat_format, body.reasoning_effort):
            call.notes.ignored_fields += ("reasoning_effort",)
        if call.services.chat_format is not None:
            template_input = with_calls(template_input, call.services.chat_format, self._choice)
        template_input = with_form(template_input, asked.form)
        self._turns = MessageTurns(
            call,
            messages,
            num_replies=body.num_choices,
            store=body.store,
            metadata=body.metadata,
            template_input=template_input,
            is_new=body.prompt_logprobs is not None,
            keyed=keyed,
        )
        self._max_tokens = body.max_completion_tokens or body.max_tokens
        self._num_logprobs = body.num_logprobs()
        self._num_prompt_logprobs = body.prompt_logprobs
        check_not_streamed("prompt_logprobs", body.prompt_logprobs, body.stream)
        self._streams: dict[int, ReplyDeltas | None] = {}

    async def start(self) -> ReplyTurns:
        """Wait for a ticket and submit the turns; raise ApiError."""
        try:
            return await self._turns.start(self._params, max_tokens=self._max_tokens)
        except InvalidRequestError as error:
            tools = self._turns.template_input.tools
            raise as_api_error(
                error_of_calls(error, self.fields, tools, self._choice), self.fields
            ) from error

    # Methods of WireFormat

    async def record_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Add the finished turns to the index, and return the usage."""
        return await self._turns.record_usage(outputs)

    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the response with the messages of all choices, without usage."""
        choices = []
        for index, output in enumerate(outputs):
            parts = self._turns.parts(index, output.text)
            choices.append(
                {
                    "index": index,
                    "message": _message(parts),
                    "logprobs": self._all_logprobs(output.logprobs),
                    "finish_reason": self._finish_reason(output, len(parts.calls), is_cut=parts.is_cut),
                }
            )
        whole = {**self._head("chat.completion"), "choices": choices}
        number, entries = self._num_prompt_logprobs, outputs[0].prompt_logprobs
        if number is not None and entries is not None:
            whole["prompt_logprobs"] = prompt_logprobs_field(entries, number, self._services.token_texts)
        return whole

    def head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk")

    def first_choices(self) -> Iterable[bytes]:
        """Return a first choice with the assistant's role for each answer."""
        return [
            _choice(index, b'{"role":"assistant","content":""}') for index in range(self._body.num_choices)
        ]

    def choices(self, index: int, delta: AsyncDelta) -> Iterable[bytes]:
        """Return text and logprobs; the logprobs of a character with several tokens precede its text."""
        if not delta.text and not delta.logprobs:
            return ()
        stream = self._stream(index)
        texts = [_content(delta.text)] if stream is None else stream.deltas(delta.text)
        if delta.logprobs is None:
            return [_choice(index, text) for text in texts]
        # The first delta has the logprobs of all tokens since the one before.
        first, *others = texts or [_content("")]
        logprobs = encode_json(self._logprobs(delta.logprobs))
        return [_choice(index, first, logprobs), *(_choice(index, text) for text in others)]

    def last_choices(self, index: int, output: Output) -> Iterable[bytes]:
        """Return what was held back, and the last delta of a choice, with only its finish reason."""
        stream = self._stream(index)
        rest = [] if stream is None else stream.end()
        num_calls, is_cut = (0, False) if stream is None else (stream.num_calls, stream.is_in_call)
        found = self._finish_reason(output, num_calls, is_cut=is_cut)
        return [*(_choice(index, text) for text in rest), _choice(index, b"{}", reason=found)]

    # Private methods

    def _stream(self, index: int) -> ReplyDeltas | None:
        """Return the stream of a choice's parts; None if its reply is content only."""
        if index not in self._streams:
            context = self._turns.contexts[index]
            template = context.template_input
            self._streams[index] = (
                ReplyDeltas(template, context.node.turn_id) if has_parts(template) else None
            )
        return self._streams[index]

    def _finish_reason(self, output: Output, num_calls: int, *, is_cut: bool) -> str:
        """Return how a choice ended: "tool_calls" if its reply has calls and is complete.

        `is_cut` is whether the reply ended within a call. Where the client's own stop string or id ended it
        there, the call must not run. A call that the model itself left incomplete is what it called.
        """
        if output.finish_reason != "stop" or not num_calls:
            return output.finish_reason
        stop_ids = frozenset(self._body.stop_token_ids or ()).difference(
            self._services.engine.info.limits.eos_token_ids
        )
        is_stopped = output.stop_string is not None or not stop_ids.isdisjoint(output.token_ids[-1:])
        return "stop" if is_cut and is_stopped else "tool_calls"

    def _params(self, room: int) -> list[SamplingParams]:
        """Return the parameters of each choice, for contexts that leave `room` tokens for a reply."""
        params = choice_params(
            self._body,
            self._services.defaults,
            max_tokens=self._max_tokens or max(1, room),
            logprobs=self._num_logprobs,
            structured=self._form,
        )
        template_input = self._turns.contexts[0].template_input
        # Once for all choices, which differ in their seeds: the grammar of many tools takes long to write.
        first = with_choice(params[0], template_input, self._choice, self._services.chat_format)
        if first is not params[0]:
            params = [replace(one, structured=first.structured) for one in params]
        return scored_by_the_first(params, self._num_prompt_logprobs)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._turns.contexts[0].node.turn_id}",
            "object": kind,
            "created": int(self._turns.created_at_s),
            "model": self._services.model_name,
        }

    def _all_logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """Return the log-probabilities of a whole reply."""
        if logprobs is None:
            return None
        return {"content": EncodedList(map(self._entry, logprobs)), "refusal": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        return {"content": [self._entry(one) for one in logprobs], "refusal": None}

    def _entry(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._token(*likely) for likely in one.top.items()]
        return {**self._token(one.token_id, one.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        texts = self._services.token_texts
        return {"token": texts.text(token_id), "logprob": logprob, "bytes": texts.raw(token_id)}


class ReplyDeltas:
    """The deltas of a reply with parts, as encoded JSON objects, from its text as it arrives."""

    def __init__(self, template: TemplateInput, turn_id: str) -> None:
        """Start at the beginning of the reply of the turn `turn_id`."""
        self._parser = new_parser(template)
        self._reply, self._turn_id = template.reply, turn_id
        self.num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends within a call."""
        return self._parser.is_in_call

    def deltas(self, text: str) -> list[bytes]:
        """Return the deltas of the next piece of text."""
        return [encode_json(self._delta(event)) for event in _shown(self._parser.feed(text))]

    def end(self) -> list[bytes]:
        """Return the deltas of what was held back."""
        return [encode_json(self._delta(event)) for event in _shown(self._parser.end())]

    def _delta(self, event: ReplyEvent) -> dict[str, Any]:
        match event:
            case ReasoningText(text):
                return {"reasoning": text, "reasoning_content": text}
            case CallBegun(call, name, header):
                self.num_calls += 1
                found = call_id(self._turn_id, call, row=self._reply.calls, header=header)
                return {"tool_calls": [{"index": call, **message_call(found, name, "")}]}
            case ArgumentText(call, text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
        assert isinstance(event, ContentText)
        return {"content": event.text}


def _shown(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    return [event for event in events if not isinstance(event, CallEnded)]


def _message(parts: ReplyParts) -> dict[str, Any]:
    """Return the message of a choice, whose reasoning has both names that clients read."""
    message = {**message_of(parts), "refusal": None}
    return message | {"reasoning_content": parts.reasoning} if parts.reasoning else message


def _content(text: str) -> bytes:
    return b'{"content":' + encode_json(text) + b"}"


def _choice(index: int, delta: bytes, logprobs: bytes = b"null", *, reason: str | None = None) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
        index,
        delta,
        logprobs,
        b"null" if reason is None else encode_json(reason),
    )
