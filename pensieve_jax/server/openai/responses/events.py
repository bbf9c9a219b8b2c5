"""The events of a streamed response, and the streams made of them.

Owns: the event types, their order, numbers and fields, and the end of a stream. All streams are made here,
from the pieces of a reply: of a running turn, of a response that runs as a task, or of a stored response.
Does not know: where a response comes from, or HTTP beyond the encoding of an event.
Called by `ResponseCreation`, `Responses` and `ForegroundResponse`.

Clients rely on this order: created, (queued), in_progress, then for each item output_item.added,
content_part.added, deltas, output_text.done, content_part.done, output_item.done, and at last completed or
incomplete. Calls have no parts. Sequence numbers count from 0 without a gap.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Output
from pensieve_jax.history.server_tables.changes import ResponseRecord
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.http.errors import ApiError, as_api_error, overloaded
from pensieve_jax.server.http.replies import DONE, Events, HttpResponse, encode_json, event
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.output import new_output
from pensieve_jax.server.openai.responses.pieces import MAX_BATCH, ReplyPieces, TextPiece
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS
from pensieve_jax.server.openai.responses.response import (
    ResponseHead,
    head_of,
    stored_logprobs,
    stored_response,
)
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.server.turns.run import TimedTurn
from pensieve_jax.text.replies import shown_marks
from pensieve_jax.text.token_texts import TokenTexts

REPLAYED_OTHERWISE = ApiError(
    500,
    "replayed_otherwise",
    "The engine restarted and sampled a different reply; retrieve the response again.",
)
NOT_RUNNING = overloaded("The response is queued and has not started; stream it again later.", 1)


class ResponseEvents:
    """An encoder of the events of one response.

    Events up to `starting_after` are counted but encoded as b"". The events of an end without a reply follow
    `starting_after`, so that every client gets them.
    """

    def __init__(self, head: ResponseHead, texts: TokenTexts, starting_after: int = -1) -> None:
        """Prepare the events of the response with this head; `texts` are those of its tokens."""
        self._head = head
        self._starting_after = starting_after
        self._last_number = -1
        self._output = new_output(head.turn_id, head.template_input, texts)

    def equals(self, response: Mapping[str, Any]) -> bool:
        """Return whether the deltas so far, up to the end, add up to the output of a response object."""
        return self._output.equals(response)

    def begin(self, *, background: bool) -> list[bytes]:
        """Return the events before the first delta."""
        events = [self._lifecycle("response.created", "queued" if background else "in_progress")]
        if background:
            events.append(self._lifecycle("response.queued", "queued"))
        events.append(self._lifecycle("response.in_progress", "in_progress"))
        return events + [self._write(*one) for one in self._output.begin()]

    def piece(self, piece: TextPiece) -> bytes:
        """Return the events for a piece of the reply."""
        return b"".join(self._write(*one) for one in self._output.add(piece))

    def end(self, response: Mapping[str, Any]) -> list[bytes]:
        """Return the events after the last delta, given the final response object."""
        last = (f"response.{response['status']}", {"response": response})
        return [self._write(*one) for one in (*self._output.end(response), last)]

    def failure(self, error: ApiError) -> list[bytes]:
        """Return the events after the last delta of a failed response."""
        response = self._head.failed(failure_object(error))
        return [self.interruption(error), self._write("response.failed", {"response": response})]

    def interruption(self, error: ApiError) -> bytes:
        """Return the event for a stream that ends while its response continues."""
        self._skip_to_client()
        return self._write("error", {"code": error.code, "message": error.message, "param": error.param})

    def cancelled(self) -> list[bytes]:
        """Return the events after the last delta of a cancelled response; OpenAI defines no event for it."""
        self._skip_to_client()
        response = self._head.object("cancelled")
        return [self._write("response.incomplete", {"response": response})]

    # Private methods

    def _skip_to_client(self) -> None:
        """Number the next event after those that the client has, although their deltas are not stored."""
        self._last_number = max(self._last_number, self._starting_after)

    def _lifecycle(self, kind: str, status: str) -> bytes:
        return self._write(kind, {"response": self._head.object(status)})

    def _write(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._last_number += 1
        if self._last_number <= self._starting_after:
            return b""
        return event(encode_json({"type": kind, "sequence_number": self._last_number, **fields}), kind)


def failure_object(error: ApiError) -> dict[str, Any]:
    """Return the `error` object of a failed response.

    OpenAI defines the values of `code`, which strict clients check; `pensieve_code` is this server's.
    """
    code = "rate_limit_exceeded" if error.status in (429, 503) else "server_error"
    return {"code": code, "message": error.message, "pensieve_code": error.code}


async def turn_events(
    head: ResponseHead,
    turn: TimedTurn,
    pieces: ReplyPieces,
    texts: TokenTexts,
    *,
    finish: Callable[[Output], Awaitable[Mapping[str, Any]]],
    delivered: Callable[[], None],
) -> AsyncGenerator[bytes]:
    """Yield the events of a turn that only this stream follows; a failure becomes events in the stream.

    Args:
        head: the head of the response.
        turn: the accepted turn, with no delta consumed yet.
        pieces: divides its reply.
        texts: texts of tokens for log-probabilities.
        finish: makes the response object from the turn's output.
        delivered: called once the client has the whole response. It is not called after a failure, because
          the turn may be committed nevertheless, before the engine died.
    """
    events = ResponseEvents(head, texts)
    try:
        async for data in _reply_events(events, _turn_pieces(turn, pieces), background=False):
            yield data
        assert turn.output is not None
        response = await finish(turn.output)
    except (ApiError, PensieveError) as error:
        for data in events.failure(as_api_error(error, ENGINE_FIELDS)):
            yield data
    else:
        for data in events.end(response):
            yield data
        delivered()
    yield DONE


async def run_events(
    run: ResponseRun, head: ResponseHead, texts: TokenTexts, starting_after: int = -1
) -> AsyncGenerator[bytes]:
    """Yield the events of a response that runs as a task, from the one after `starting_after` on."""
    events = ResponseEvents(head, texts, starting_after)
    async for data in _reply_events(events, run.pieces(), background=run.background):
        yield data
    for data in _last_events(events, run.response, run.error):
        yield data
    yield DONE


async def stored_events(
    head: ResponseHead,
    response: Mapping[str, Any],
    reply: AsyncDelta,
    pieces: ReplyPieces,
    texts: TokenTexts,
    starting_after: int = -1,
) -> AsyncGenerator[bytes]:
    """Yield the events of a response that has ended, as a live stream would have had them.

    Args:
        head: the head of the response.
        response: the response object.
        reply: the whole reply.
        pieces: divides it.
        texts: texts of tokens for log-probabilities.
        starting_after: number of the last event to leave out.
    """
    events = ResponseEvents(head, texts, starting_after)
    background = bool(head.echo.get("background"))
    async for data in _reply_events(events, _batches(pieces.split(reply)), background=background):
        yield data
    for data in _last_events(events, response, None):
        yield data
    yield DONE


class ResponseStreams:
    """Maker of the response streams of one server."""

    def __init__(self, services: Services) -> None:
        """Use the settings, the tokenizer and the history of `services`."""
        self._services = services

    def reply(
        self,
        events: AsyncGenerator[bytes],
        on_end: Callable[[], Awaitable[None]] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> HttpResponse:
        """Return a streaming response of events; see `http.replies.Events`."""
        settings = self._services.settings
        return Events(
            events,
            heartbeat_s=settings.heartbeat_s,
            on_end=on_end,
            on_tick=on_tick,
        )

    def run(self, run: ResponseRun, head: ResponseHead, starting_after: int = -1) -> AsyncGenerator[bytes]:
        """Return the events of a response that runs as a task; see `run_events`."""
        return run_events(run, head, self._services.token_texts, starting_after)

    async def stored(self, record: ResponseRecord, starting_after: int = -1) -> AsyncGenerator[bytes]:
        """Return the events of a stored response, from the one after `starting_after` on."""
        services, reply = self._services, AsyncDelta("", ())
        if record.turn_id is not None:
            turn = await services.read(record.owner, services.history.turn, record.owner, record.turn_id)
            reply = AsyncDelta(record.output_text or "", turn.output_token_ids, stored_logprobs(record))
        head = head_of(record, record.template_input)
        pieces = ReplyPieces(services.tokenizer, shown_marks(head.template_input))
        response = stored_response(record, services.token_texts)
        return stored_events(head, response, reply, pieces, services.token_texts, starting_after)


class StartedStream:
    """A stream of events that records whether the client has taken the first one."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events
        self.has_begun = False

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events; set `has_begun` once the client has taken the first one."""
        async with aclosing(self._events) as events:
            async for data in events:
                yield data
                self.has_begun = True


async def _reply_events(
    events: ResponseEvents,
    batches: AsyncIterator[Sequence[TextPiece]],
    *,
    background: bool,
) -> AsyncIterator[bytes]:
    """Yield the first events, and then those of each piece; those of a batch are sent together."""
    for data in events.begin(background=background):
        if data:
            yield data
    async for batch in batches:
        data = b"".join(map(events.piece, batch))
        if data:
            yield data
        if len(batch) >= MAX_BATCH:  # skipped events do no writes that would yield
            await asyncio.sleep(0)


async def _turn_pieces(turn: TimedTurn, pieces: ReplyPieces) -> AsyncIterator[Sequence[TextPiece]]:
    async for delta in turn:
        yield list(pieces.split(delta))


async def _batches(pieces: Iterable[TextPiece]) -> AsyncIterator[Sequence[TextPiece]]:
    for batch in itertools.batched(pieces, MAX_BATCH):
        yield batch


def _last_events(
    events: ResponseEvents, response: Mapping[str, Any] | None, error: ApiError | None
) -> list[bytes]:
    if error is not None and error.status == 503:
        last = [events.interruption(error)]
    elif error is not None or response is None:
        last = events.failure(error or REPLAYED_OTHERWISE)
    elif response["status"] == "queued":  # queued for the first time, or left to the next server at shutdown
        last = [events.interruption(NOT_RUNNING)]
    elif response["status"] == "failed":
        failed = response["error"]
        last = events.failure(ApiError(500, failed.get("pensieve_code", failed["code"]), failed["message"]))
    elif response["status"] == "cancelled":
        last = events.cancelled()
    elif not events.equals(response):
        last = events.failure(REPLAYED_OTHERWISE)
    else:
        last = events.end(response)
    return [data for data in last if data]
