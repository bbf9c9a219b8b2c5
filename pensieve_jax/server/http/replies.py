"""What a handler answers with, and how that is written to a client: whole answers and streams of events.

Owns: JSON and plain text; how an event is written, comments in silence, what happens when a client leaves or
takes nothing.
Does not know: what answers and events say, or what to do about a turn whose client left: the iterator of
events does.

Every event is one write, since some readers forget half an event between two reads. Nothing is queued here:
while a client does not take an event, the next one is not asked for, and the turn merges its deltas. Events
that are there already, of a reply that is kept, wait for nothing: other requests run in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
from starlette.types import Message, Receive, Send

from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.request import ClientGoneError, until_disconnect

_ENCODER = msgspec.json.Encoder()
encode_json = _ENCODER.encode
"""A value of plain ones, structs and dataclasses as JSON."""
DONE = b"data: [DONE]\n\n"
"""The last event of a stream, by OpenAI's rules."""
_COMMENT = b": still here\n\n"
_TURN_BYTES: Final = 16 * 2**10
"""After so many, others get a turn of the loop: a millisecond's or two's work of a kept reply."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would hold events back
]


class HttpResponse(Protocol):
    """An answer that can send itself, once."""

    async def send(self, receive: Receive, send: Send) -> None:
        """Write it; `receive` tells when the client leaves."""
        ...


@dataclass(slots=True)
class Bytes:
    """An answer of bytes that are there already.

    Attributes:
      undelivered: called where the client has left before it was written.
    """

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    undelivered: Callable[[], None] | None = None

    async def send(self, receive: Receive, send: Send) -> None:
        """Write it in one piece; raises ClientGoneError where `undelivered` was called."""
        headers = [
            (b"content-type", self.content_type.encode("latin-1")),
            (b"content-length", str(len(self.body)).encode()),
            *(
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in self.headers.items()
            ),
        ]
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        if self.undelivered is None:
            await send(start)
            await send({"type": "http.response.body", "body": self.body})
        else:
            await self._send_watched(start, receive, send, self.undelivered)

    async def _send_watched(
        self, start: Message, receive: Receive, send: Send, undelivered: Callable[[], None]
    ) -> None:
        """A server takes whatever is sent to a client that has left, and says so by `receive` alone."""
        watch = asyncio.ensure_future(until_disconnect(receive))
        is_written = False
        try:
            await send(start)
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await asyncio.sleep(0)  # or the watch would not have looked
            is_written = not watch.done()
        finally:
            watch.cancel()
            if not is_written:
                undelivered()
        if not is_written:
            raise ClientGoneError
        await send({"type": "http.response.body", "body": b""})


def json_reply(
    value: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    undelivered: Callable[[], None] | None = None,
) -> Bytes:
    """A JSON answer; see `Bytes`."""
    return Bytes(encode_json(value), "application/json", status, headers or {}, undelivered)


def error_reply(error: ApiError) -> Bytes:
    """The answer that says what is wrong."""
    return json_reply(error.body, error.status, error.headers)


def event(data: bytes, name: str | None = None) -> bytes:
    """An event of one line of JSON, as it is written."""
    if name is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), data)


@dataclass(slots=True)
class Events:
    """A stream of events, each as `event` writes it.

    Attributes:
      events: closed when the client leaves or takes nothing for too long, which it sees as GeneratorExit or
        CancelledError: what it began, it ends then.
      on_end: called once, however the stream ended; also where it never began.
      heartbeat_s, stall_timeout_s: see `ServerSettings`.
    """

    events: AsyncGenerator[bytes]
    heartbeat_s: float = 15.0
    stall_timeout_s: float = 30.0
    on_end: Callable[[], Awaitable[None]] | None = None

    async def send(self, receive: Receive, send: Send) -> None:
        """Write events until there are no more; raises ClientGoneError where the client left first."""
        try:
            async with aclosing(self.events):
                await self._send_all(receive, send)
        finally:
            if self.on_end is not None:
                await self.on_end()

    async def _send_all(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        open_ = asyncio.timeout(None)  # without a time: somebody says when it is over
        try:
            async with open_:
                writer = _Writer(send, self, open_)
                watch = asyncio.ensure_future(_close_on_disconnect(receive, open_))
                try:
                    async for data in self.events:
                        await writer.write(data)
                    await writer.end()
                finally:
                    watch.cancel()
                    writer.stop()
        except TimeoutError as error:
            if open_.expired():
                raise ClientGoneError from error
            raise


async def _close_on_disconnect(receive: Receive, open_: asyncio.Timeout) -> None:
    await until_disconnect(receive)
    _end(open_)


def _end(open_: asyncio.Timeout) -> None:
    """End what is open, unless it is about to end for another reason."""
    if not open_.expired():
        open_.reschedule(0.0)  # a time that has passed


class _Writer:
    """One client's writes; a timer that looks at them now and then, since one for each would cost more."""

    def __init__(self, send: Send, settings: Events, open_: asyncio.Timeout) -> None:
        self._send = send
        self._settings = settings
        self._open = open_
        self._loop = asyncio.get_running_loop()
        self._period_s = min(settings.heartbeat_s, settings.stall_timeout_s) / 4
        self._lock = asyncio.Lock()
        self._write_began_s: float | None = None
        self._num_bytes = 0  # since others had their turn
        self._last_write_s = self._loop.time()
        self._comment: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(self._period_s, self._look)

    async def write(self, data: bytes) -> None:
        await self._write(data, more=True)
        self._num_bytes += len(data)
        if self._num_bytes >= _TURN_BYTES:
            self._num_bytes = 0
            await asyncio.sleep(0)

    async def end(self) -> None:
        """The last write, which has to wait as others do until the client has taken what was before it."""
        await self._write(b"", more=False)

    def stop(self) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def _write(self, data: bytes, *, more: bool) -> None:
        async with self._lock:  # a comment may be on its way
            self._write_began_s = self._loop.time()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._write_began_s = None
            self._last_write_s = self._loop.time()

    def _look(self) -> None:
        now_s = self._loop.time()
        if self._write_began_s is not None:
            if now_s - self._write_began_s >= self._settings.stall_timeout_s:
                _end(self._open)
                return
        elif now_s - self._last_write_s >= self._settings.heartbeat_s and not self._lock.locked():
            self._comment = asyncio.ensure_future(self.write(_COMMENT))
        self._timer = self._loop.call_later(self._period_s, self._look)
