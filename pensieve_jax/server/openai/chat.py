"""The route POST /v1/chat/completions.

Owns: the steps of a chat completion, and the form of its response, whole and in chunks.
Does not know: how a context is resolved, or how turns run. Called by the application.

A client sends all messages of a conversation each time. The resolver finds the turn that they continue from,
so the engine computes only new tokens. Turns stay in the engine's memory; they are also stored in the history
if the request has `store` or the server's `chat_history` is "durable".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from pensieve_jax.core.outputs import FinishReason, Output, TokenLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.server.async_engine import AsyncDelta
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
from pensieve_jax.server.turns.checks import check_metadata, check_model
from pensieve_jax.server.turns.message_turns import MessageTurns
from pensieve_jax.server.turns.run import RunningTurns
from pensieve_jax.server.turns.sampling import choice_params


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
        self._body = body
        check_metadata(body.metadata)
        self._turns = MessageTurns(
            call,
            body.context(),
            num_replies=body.num_choices,
            store=body.store,
            metadata=body.metadata,
            is_new=body.prompt_logprobs is not None,
        )
        self._max_tokens = body.max_completion_tokens or body.max_tokens
        self._num_logprobs = body.num_logprobs()
        self._num_prompt_logprobs = body.prompt_logprobs
        check_not_streamed("prompt_logprobs", body.prompt_logprobs, body.stream)
        self._created = int(self._services.now_s())

    async def start(self) -> RunningTurns:
        """Wait for a ticket and submit the turns; raise ApiError."""
        with renamed_fields(self.fields):
            return await self._turns.start(self._params, max_tokens=self._max_tokens)

    # Methods of WireFormat

    def record_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Add the finished turns to the index, and return the usage."""
        return self._turns.record_usage(outputs)

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

    def _params(self, room: int) -> list[SamplingParams]:
        """Return the parameters of each choice, for contexts that leave `room` tokens for a reply."""
        params = choice_params(
            self._body,
            self._services.defaults,
            max_tokens=self._max_tokens or max(1, room),
            logprobs=self._num_logprobs,
        )
        return scored_by_the_first(params, self._num_prompt_logprobs)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._turns.contexts[0].node.turn_id}",
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
