"""The route POST /v1/chat/completions.

Owns: the steps of a chat completion, and the form of its response, whole and in chunks.
Does not know: how a context is resolved, or how turns run. Called by the application.

A client sends all messages of a conversation each time. The resolver finds the turn that they continue from,
so the engine computes only new tokens. Turns stay in the engine's memory; they are also stored in the history
if the request has `store` or the server's `chat_history` is "durable".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from pensieve_jax.core.errors import ChatTemplateError
from pensieve_jax.core.outputs import FinishReason, Output, TokenLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import ResponseDraft
from pensieve_jax.server.async_engine import AsyncDelta, AsyncTurn
from pensieve_jax.server.context.resolver import Memory, ResolvedContext, has_reply
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.errors import renamed_fields
from pensieve_jax.server.http.replies import HttpResponse, encode_json
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.openai.completion_stream import reply_in
from pensieve_jax.server.openai.prompt_logprobs import (
    check_not_streamed,
    prompt_logprobs_field,
    scored_by_the_first,
)
from pensieve_jax.server.openai.schemas import ChatBody
from pensieve_jax.server.turns.checks import (
    check_metadata,
    check_model,
    check_num_tokens,
    commit_context,
    context_token_limit,
    template_error,
)
from pensieve_jax.server.turns.items import item_of
from pensieve_jax.server.turns.run import RunningTurns, run_turns, start_turns
from pensieve_jax.server.turns.sampling import choice_params, completion_usage
from pensieve_jax.server.turns.stored import completion_echo, stored_draft
from pensieve_jax.server.workers import WorkEstimate, is_long


async def create_chat_completion(call: HttpRequest) -> HttpResponse:
    """Answer a list of messages with one or more replies."""
    body = await call.decode(ChatBody)
    check_model(call.services, body.model)
    completion = await call.run_cpu(ChatCompletion, call, body)
    return await reply_in(completion, call, body, await completion.start())


ROUTES = [Route("POST", "/v1/chat/completions", create_chat_completion)]


class ChatCompletion:
    """One chat completion request, from its messages to its response. It is a `WireFormat`."""

    fields: Final = {"prompt": "messages", "logprobs": "top_logprobs"}

    def __init__(self, call: HttpRequest, body: ChatBody) -> None:
        """Check the decoded body as a whole; raise ApiError."""
        self._services = call.services
        self._notes = call.notes
        self._wait = call.unless_gone
        self._owner = call.owner
        self._body = body
        check_metadata(body.metadata)
        self._messages = body.context()
        self._max_tokens = body.max_completion_tokens or body.max_tokens
        self._num_logprobs = body.num_logprobs()
        self._num_prompt_logprobs = body.prompt_logprobs
        check_not_streamed("prompt_logprobs", body.prompt_logprobs, body.stream)
        self._created = int(self._services.now_s())
        self._contexts: list[ResolvedContext] = []

    async def start(self) -> RunningTurns:
        """Wait for a ticket and submit the turns; raise ApiError."""
        num_characters = sum(len(message["content"]) for message in self._messages)
        estimate = WorkEstimate(is_long(num_characters, len(self._messages)), has_reply(self._messages))

        async def start() -> Sequence[AsyncTurn]:
            _, turns = await start_turns(
                self._services.engine,
                self._find,
                self._specs,
                run_cpu=partial(self._services.run_cpu, self._owner, estimate),
            )
            return turns

        with renamed_fields(self.fields):
            return await run_turns(
                self._services,
                self._owner,
                start,
                num_turns=self._body.num_choices,
                num_tokens=num_characters // 4,
                max_tokens=self._max_tokens,
                num_shared=self._body.num_choices,
                wait=self._wait,
            )

    # Methods of WireFormat

    def record_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Add the finished turns to the index, and return the usage."""
        for context, output in zip(self._contexts, outputs, strict=True):
            if output.prompt_logprobs is None or context.node.durable:
                commit_context(self._services, context, output)
        usage = completion_usage([output.usage for output in outputs], len(outputs))
        self._notes.counts |= usage
        return usage

    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the response with the messages of all choices, without usage."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
            }
            for index, output in enumerate(outputs)
        ]
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

    def choice(self, index: int, delta: AsyncDelta) -> bytes | None:
        """Return text and logprobs; the logprobs of a character with several tokens precede its text."""
        if not delta.text and not delta.logprobs:
            return None
        content = b'{"content":' + encode_json(delta.text) + b"}"
        if delta.logprobs is None:
            return _choice(index, content)
        return _choice(index, content, encode_json(self._logprobs(delta.logprobs)))

    def last_choice(self, index: int, reason: FinishReason) -> bytes:
        """Return the last delta of a choice, with only its finish reason."""
        return _choice(index, b"{}", reason=reason)

    # Private methods

    def _find(self, memory: Memory) -> ResolvedContext:
        services = self._services
        store = self._body.store
        if memory is not Memory.ALL:
            services.metrics.rebuilt("turn_lost")
        if self._num_prompt_logprobs is not None:
            memory = Memory.NONE  # the prompt is the whole context, whatever an earlier turn has computed
        try:
            return services.resolver.resolve(
                self._owner,
                self._messages,
                epoch=services.engine.epoch,
                durable=services.settings.chat_history == "durable" if store is None else store,
                memory=memory,
                token_limit=context_token_limit(services),
            )
        except ChatTemplateError as error:
            raise template_error(error, self._messages, "messages") from error

    def _specs(self, resolved: ResolvedContext) -> list[TurnSpec]:
        """Return one turn for each choice; they are siblings after the same parent."""
        body, services = self._body, self._services
        check_num_tokens(services, resolved.num_context_tokens, "messages")
        self._contexts = [resolved, *(resolved.again() for _ in range(body.num_choices - 1))]
        room = services.engine.info.limits.max_context_tokens - resolved.num_context_tokens
        params = choice_params(
            body,
            services.defaults,
            max_tokens=self._max_tokens or max(1, room),
            logprobs=self._num_logprobs,
        )
        return [
            context.spec(one, self._attachment(context, one))
            for context, one in zip(
                self._contexts, scored_by_the_first(params, self._num_prompt_logprobs), strict=True
            )
        ]

    def _attachment(self, context: ResolvedContext, params: SamplingParams) -> ResponseDraft | None:
        """Return the record to commit with a turn that is stored, else None."""
        node = context.node
        if not node.durable:
            return None
        services = self._services
        echo = completion_echo(services.model_name, params, self._body.metadata)
        items = map(item_of, context.messages)
        return stored_draft(self._owner, node.turn_id, echo, items, services.now_s())

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._contexts[0].node.turn_id}",
            "object": kind,
            "created": self._created,
            "model": self._services.model_name,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {
                **self._token(one.token_id, one.logprob),
                "top_logprobs": [self._token(*top) for top in one.top.items()],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        texts = self._services.token_texts
        return {"token": texts.text(token_id), "logprob": logprob, "bytes": texts.raw(token_id)}


def _choice(index: int, delta: bytes, logprobs: bytes = b"null", *, reason: str | None = None) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
        index,
        delta,
        logprobs,
        encode_json(reason),
    )
