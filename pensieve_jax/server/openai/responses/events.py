"""The events of a streamed response, in the order that clients rely on, and the streams made of them.

Owns: which events there are, their order, numbers and fields; making them of the deltas of a turn, of the
tokens of a response that runs by itself, and of the ids of one that is kept; what ends a stream.
Does not know: where a response comes from, or HTTP beyond what an event is.

The order: created, (queued), in_progress, output_item.added, content_part.added, deltas, output_text.done,
content_part.done, output_item.done, completed or incomplete. Numbers count from 0 without a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Output, TokenLogprob
from pensieve_jax.history.server_tables.changes import ResponseRecord
from pensieve_jax.server.http.errors import ApiError, as_api_error, overloaded
from pensieve_jax.server.http.replies import DONE, Events, HttpResponse, encode_json, event
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS
from pensieve_jax.server.openai.responses.response import (
    ResponseHead,
    head_of,
    kept_response,
    logprob_objects,
)
from pensieve_jax.server.openai.responses.run import ResponseRun, Token
from pensieve_jax.server.turns.items import output_part
from pensieve_jax.server.turns.run import TimedTurn
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.detokenizer import IncrementalDetokenizer
from pensieve_jax.text.token_texts import TokenTexts

REPLAYED_OTHERWISE = ApiError(
    500,
    "replayed_otherwise",
    "The engine was started again and sampled another reply; get the response anew.",
)
_TURN_TOKENS: Final = 64
"""After so many that are there already, others get a turn of the loop: making their text takes some ms."""
NOT_RUNNING = overloaded("The response is queued and has not begun; follow it again in a moment.", 1)


class ResponseEvents:
    """Writes the events of one response. Those up to `starting_after` are counted, but come out as b""."""

    def __init__(self, head: ResponseHead, starting_after: int = -1) -> None:
        """Nothing is written yet."""
        self._head = head
        self._starting_after = starting_after
        self._last_number = -1
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of the reply that there were events of."""
        return "".join(self._texts)

    def begin(self, *, background: bool) -> list[bytes]:
        """Everything before the first delta."""
        head = self._head
        events = [self._lifecycle("response.created", "queued" if background else "in_progress")]
        if background:
            events.append(self._lifecycle("response.queued", "queued"))
        events.append(self._lifecycle("response.in_progress", "in_progress"))
        item = head.item("in_progress")
        events.append(self._write("response.output_item.added", {"output_index": 0, "item": item}))
        part = {**self._place(), "part": output_part("")}
        events.append(self._write("response.content_part.added", part))
        return events

    def delta(self, text: str, logprobs: Sequence[Any] = ()) -> bytes:
        """A piece of the reply."""
        self._texts.append(text)
        fields = {**self._place(), "delta": text, "logprobs": list(logprobs)}
        return self._write("response.output_text.delta", fields)

    def end(self, response: Mapping[str, Any]) -> list[bytes]:
        """Everything behind the last delta, of the response object with its reply."""
        (item,) = response["output"]
        (part,) = item["content"]
        done = {**self._place(), "text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._write("response.output_text.done", done),
            self._write("response.content_part.done", {**self._place(), "part": part}),
            self._write("response.output_item.done", {"output_index": 0, "item": item}),
            self._write(f"response.{response['status']}", {"response": response}),
        ]

    def failure(self, error: ApiError) -> list[bytes]:
        """What comes behind the last delta of a response that failed."""
        response = self._head.failed(failure_object(error))
        return [self.interruption(error), self._write("response.failed", {"response": response})]

    def interruption(self, error: ApiError) -> bytes:
        """Why a stream ends before its response, which goes on."""
        return self._write("error", {"code": error.code, "message": error.message, "param": error.param})

    def cancelled(self) -> list[bytes]:
        """What comes behind the last delta of a response that was cancelled; OpenAI has no event of it."""
        response = self._head.object("cancelled")
        return [self._write("response.incomplete", {"response": response})]

    # Inside

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._head.item_id, "output_index": 0, "content_index": 0}

    def _lifecycle(self, kind: str, status: str) -> bytes:
        return self._write(kind, {"response": self._head.object(status)})

    def _write(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._last_number += 1
        if self._last_number <= self._starting_after:
            return b""
        return event(encode_json({"type": kind, "sequence_number": self._last_number, **fields}), kind)


def failure_object(error: ApiError) -> dict[str, Any]:
    """What a failed response says of its error; the codes are a list of OpenAI's."""
    code = "rate_limit_exceeded" if error.status in (429, 503) else "server_error"
    return {"code": code, "message": error.message}


async def turn_events(
    head: ResponseHead,
    turn: TimedTurn,
    texts: TokenTexts,
    *,
    finish: Callable[[Output], Mapping[str, Any]],
    delivered: Callable[[], None],
) -> AsyncGenerator[bytes]:
    """The events of a turn that this stream alone follows; what fails in between is told in the stream.

    Args:
      head: of its response.
      turn: accepted; nobody has taken anything of it.
      texts: for the names of tokens in log-probabilities.
      finish: makes the response object of the turn's output.
      delivered: called once the client has taken the whole response; not where it was told of a failure:
        the turn may have been committed all the same, before its engine died.
    """
    events = ResponseEvents(head)
    for data in events.begin(background=False):
        yield data
    try:
        waiting: list[TokenLogprob] = []  # of tokens whose text has not come yet
        async for delta in turn:
            waiting += delta.logprobs or ()
            if delta.text:
                yield events.delta(delta.text, logprob_objects(texts, waiting))
                waiting.clear()
        assert turn.output is not None
        response = finish(turn.output)
    except (ApiError, PensieveError) as error:
        for data in events.failure(as_api_error(error, ENGINE_FIELDS)):
            yield data
    else:
        for data in events.end(response):
            yield data
        delivered()
    yield DONE


class ReplyTexts(NamedTuple):
    """How token ids become the text of a reply; `ending_ids` end one and are no part of its text.

    `names` are those of tokens in log-probabilities.
    """

    tokenizer: Tokenizer
    ending_ids: Sequence[int]
    names: TokenTexts


async def run_events(
    run: ResponseRun, head: ResponseHead, texts: ReplyTexts, starting_after: int = -1
) -> AsyncGenerator[bytes]:
    """The events of a response that runs by itself, from the first one after a number."""
    events = ResponseEvents(head, starting_after)
    async for data in _token_events(events, run.tokens(), texts, background=run.background):
        yield data
    for data in _last_events(events, run.response, run.error):
        yield data
    yield DONE


async def kept_events(
    head: ResponseHead,
    response: Mapping[str, Any],
    token_ids: Iterable[int],
    texts: ReplyTexts,
    starting_after: int = -1,
) -> AsyncGenerator[bytes]:
    """The events of a response that has ended, as they were or would have been."""
    events = ResponseEvents(head, starting_after)
    background = bool(head.echo.get("background"))
    async for data in _token_events(events, _each(token_ids), texts, background=background):
        yield data
    for data in _last_events(events, response, None):
        yield data
    yield DONE


class ResponseStreams:
    """How one server streams responses."""

    def __init__(self, services: Services) -> None:
        """Of a server that starts now."""
        self._services = services

    @property
    def texts(self) -> ReplyTexts:
        """How its model's tokens become text."""
        tokenizer = self._services.tokenizer
        assert tokenizer is not None, "without one there are no responses"
        services = self._services
        return ReplyTexts(tokenizer, services.engine.info.limits.eos_token_ids, services.token_texts)

    def reply(
        self, events: AsyncGenerator[bytes], on_end: Callable[[], Awaitable[None]] | None = None
    ) -> HttpResponse:
        """Events as the answer to a request; see `http.replies.Events`."""
        settings = self._services.settings
        return Events(
            events,
            heartbeat_s=settings.heartbeat_s,
            stall_timeout_s=settings.stall_timeout_s,
            on_end=on_end,
        )

    async def kept(self, record: ResponseRecord, starting_after: int = -1) -> AsyncGenerator[bytes]:
        """The events of a response that the history has, from the first one after a number."""
        token_ids: tuple[int, ...] = ()
        if record.turn_id is not None:
            turn = await self._services.read(
                record.owner, self._services.history.turn, record.owner, record.turn_id
            )
            token_ids = turn.output_token_ids
        return kept_events(head_of(record), kept_response(record), token_ids, self.texts, starting_after)


class StartedStream:
    """Events, and whether somebody has taken the first of them."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events
        self.has_begun = False

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events; set `has_begun` once the first was taken."""
        async with aclosing(self._events) as events:
            async for data in events:
                yield data
                self.has_begun = True


async def _token_events(
    events: ResponseEvents, tokens: AsyncIterator[Token], texts: ReplyTexts, *, background: bool
) -> AsyncIterator[bytes]:
    """The beginning, and an event for each token that shows text."""
    for data in events.begin(background=background):
        if data:
            yield data
    detokenizer = IncrementalDetokenizer(texts.tokenizer)
    waiting: list[TokenLogprob] = []  # of tokens whose text has not come yet
    num_tokens = 0
    async for token_id, logprob in tokens:
        num_tokens += 1
        if num_tokens % _TURN_TOKENS == 0:  # what a client has already is not even written
            await asyncio.sleep(0)
        text = "" if token_id in texts.ending_ids else detokenizer.push(token_id)
        if logprob is not None:
            waiting.append(logprob)
        data = events.delta(text, logprob_objects(texts.names, waiting)) if text else b""
        if text:
            waiting.clear()
        if data:
            yield data
    rest = detokenizer.flush()
    data = events.delta(rest, logprob_objects(texts.names, waiting)) if rest else b""
    if data:
        yield data


def _last_events(
    events: ResponseEvents, response: Mapping[str, Any] | None, error: ApiError | None
) -> list[bytes]:
    if error is not None and error.status == 503:
        last = [events.interruption(error)]
    elif error is not None or response is None:
        last = events.failure(error or REPLAYED_OTHERWISE)
    elif response["status"] == "queued":  # being queued, or left to the next server: this one is about to end
        last = [events.interruption(NOT_RUNNING)]
    elif response["status"] == "failed":
        failed = response["error"]
        last = events.failure(ApiError(500, failed["code"], failed["message"]))
    elif response["status"] == "cancelled":
        last = events.cancelled()
    elif events.text != response["output"][0]["content"][0]["text"]:
        last = events.failure(REPLAYED_OTHERWISE)
    else:
        last = events.end(response)
    return [data for data in last if data]


async def _each(token_ids: Iterable[int]) -> AsyncIterator[Token]:
    for token_id in token_ids:
        yield token_id, None
