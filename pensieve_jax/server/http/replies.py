"""Responses of handlers and how they are sent: whole bodies and streams of server-sent events.

Owns: the encoding of JSON and of events, heartbeat comments, and the end of a stream whose client leaves or
stalls.
Does not know: what responses and events mean, or how to cancel the turn of a client that left; the iterator
of events does that. Called by the application, with responses that handlers made.

Every event is one write, since some clients lose half an event between two reads. Nothing is queued here:
until the client has taken an event, the next one is not requested, and the turn merges its deltas. Events of
a stored reply are available at once, so the writer yields to other requests between them.
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
from pensieve_jax.server.http.ledger import Ticket
from pensieve_jax.server.http.long_json import as_raw, json_pieces
from pensieve_jax.server.http.request import ClientGoneError, until_disconnect

_ENCODER = msgspec.json.Encoder(enc_hook=as_raw)
encode_json = _ENCODER.encode
"""Encode plain values, structs and dataclasses as JSON."""
DONE = b"data: [DONE]\n\n"
"""The last event of a stream in OpenAI's API."""
COMMENT = b": still here\n\n"
"""A comment, which clients skip."""
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
STALL_TIMEOUT_S: Final = 30.0
"""Default of `ServerSettings.stall_timeout_s`."""
_PIECE_BYTES: Final = 2**16
"""Bytes of a long body that are written at a time; as many wait in the socket's buffer."""
_TURN_BYTES: Final = 16 * 2**10
"""Bytes after which a stream yields to other requests: 1 to 2 ms of work for a stored reply."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers events
]


class HttpResponse(Protocol):
    """A response that can send itself once."""

    def charge(self, ticket: Ticket) -> None:
        """Charge what it holds until it is sent; raise ApiError, after which it cannot be sent."""
        ...

    async def send(self, receive: Receive, send: Send, stall_timeout_s: float) -> None:
        """Send the response; `receive` reports when the client leaves.

        Raises ClientGoneError if the client has left, or takes no data for `stall_timeout_s`.
        """
        ...


@dataclass(slots=True)
class BytesResponse:
    """A response whose body is complete.

    Attributes:
      undelivered: called if the client left before the body was written.
    """

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    undelivered: Callable[[], None] | None = None

    def charge(self, ticket: Ticket) -> None:
        """Charge the bytes of the body; if they are too many, call `undelivered`."""
        try:
            ticket.charge("answer_bytes", len(self.body))
        except ApiError:
            if self.undelivered is not None:
                self.undelivered()
            raise

    async def send(self, receive: Receive, send: Send, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        """Send the response; raise ClientGoneError after a call of `undelivered`, if there is one.

        A short body goes out in one piece. A long one is sent in pieces, each after the client has taken
        those before it. So the body counts as long as it is in memory.
        """
        headers = [
            (b"content-type", self.content_type.encode("latin-1")),
            (b"content-length", str(len(self.body)).encode()),
            *(
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in self.headers.items()
            ),
        ]
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        if self.undelivered is None and len(self.body) <= _PIECE_BYTES:
            await send(start)
            await send({"type": "http.response.body", "body": self.body})
        else:
            await self._send_watched(start, receive, send, stall_timeout_s)

    async def _send_watched(
        self, start: Message, receive: Receive, send: Send, stall_timeout_s: float
    ) -> None:
        """Send while watching `receive`, since uvicorn silently drops data for a client that has left."""
        watch = asyncio.ensure_future(until_disconnect(receive))
        is_written = False
        try:
            await send(start)
            for begin in range(0, len(self.body), _PIECE_BYTES):
                piece = self.body[begin : begin + _PIECE_BYTES]
                async with asyncio.timeout(stall_timeout_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)  # lets other requests and the watch task run
                if watch.done():
                    break
            is_written = not watch.done()
        except TimeoutError as error:
            raise ClientGoneError from error
        finally:
            watch.cancel()
            if not is_written and self.undelivered is not None:
                self.undelivered()
        if not is_written:
            raise ClientGoneError
        async with asyncio.timeout(stall_timeout_s):
            await send({"type": "http.response.body", "body": b""})


def json_reply(
    value: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    undelivered: Callable[[], None] | None = None,
) -> BytesResponse:
    """Return a JSON response; see `BytesResponse`."""
    return BytesResponse(encode_json(value), "application/json", status, headers or {}, undelivered)


def long_json_reply(value: Any) -> BytesResponse:
    """Return a long JSON response; a thread can make it without holding others up for long."""
    return BytesResponse(b"".join(json_pieces(value)), "application/json")


type ErrorReply = Callable[[ApiError, str], BytesResponse]
"""Makes the response of an error, given the request id."""


def error_reply(error: ApiError, request_id: str = "") -> BytesResponse:
    """Return the response of an error in OpenAI's form, which has the request id in a header only."""
    return json_reply(error.body, error.status, error.headers)


def event(data: bytes, name: str | None = None) -> bytes:
    """Encode a server-sent event whose data is one line of JSON.

    U+0085, U+2028 and U+2029 end no line of an event, but clients that read lines with `str.splitlines`, as
    httpx does, divide the data there. They are escaped.
    """
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    if name is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), data)


@dataclass(slots=True)
class Events:
    """A streaming response of server-sent events.

    Attributes:
      events: events as `event` encodes them. It is closed if the client leaves or stalls, which it sees as
        GeneratorExit or CancelledError; it must then end what it started.
      on_end: called once, however the stream ends, even if it never began.
      on_tick: called every few seconds while the stream is open, also while a write waits for the client.
      heartbeat: what a silent stream sends.
      heartbeat_s: see `ServerSettings`.
    """

    events: AsyncGenerator[bytes]
    heartbeat_s: float = 15.0
    on_end: Callable[[], Awaitable[None]] | None = None
    heartbeat: bytes = COMMENT
    on_tick: Callable[[], None] | None = None

    def charge(self, ticket: Ticket) -> None:
        """Charge nothing: a stream is charged where it is asked for, before its work begins."""

    async def send(self, receive: Receive, send: Send, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        """Send all events; raise ClientGoneError if the client leaves or stalls first."""
        try:
            async with aclosing(self.events):
                await self._send_all(receive, send, stall_timeout_s)
        finally:
            if self.on_end is not None:
                await self.on_end()

    async def _send_all(self, receive: Receive, send: Send, stall_timeout_s: float) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        open_ = asyncio.timeout(None)  # no deadline yet: `_end` sets one
        try:
            async with open_:
                writer = _Writer(send, self, stall_timeout_s, open_)
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
    """Expire the timeout, unless it has expired already."""
    if not open_.expired():
        open_.reschedule(0.0)  # a time in the past


class _Writer:
    """Writes to one client, watched by one periodic timer, because a timer for each write would cost more."""

    def __init__(self, send: Send, stream: Events, stall_timeout_s: float, open_: asyncio.Timeout) -> None:
        self._send = send
        self._stream = stream
        self._stall_timeout_s = stall_timeout_s
        self._open = open_
        self._loop = asyncio.get_running_loop()
        self._period_s = min(stream.heartbeat_s, stall_timeout_s) / 4
        self._lock = asyncio.Lock()
        self._write_began_s: float | None = None
        self._num_bytes = 0  # since the last yield to other requests
        self._last_write_s = self._loop.time()
        self._comment: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(self._period_s, self._check_timer)

    async def write(self, data: bytes) -> None:
        await self._write(data, more=True)
        self._num_bytes += len(data)
        if self._num_bytes >= _TURN_BYTES:
            self._num_bytes = 0
            await asyncio.sleep(0)

    async def end(self) -> None:
        """End the body; this waits, like every write, until the client has taken the data before it."""
        await self._write(b"", more=False)

    def stop(self) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def _write(self, data: bytes, *, more: bool) -> None:
        async with self._lock:  # a heartbeat may be writing
            self._write_began_s = self._loop.time()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._write_began_s = None
            self._last_write_s = self._loop.time()

    def _check_timer(self) -> None:
        now_s = self._loop.time()
        if self._stream.on_tick is not None:
            self._stream.on_tick()
        if self._write_began_s is not None:
            if now_s - self._write_began_s >= self._stall_timeout_s:
                _end(self._open)
                return
        elif now_s - self._last_write_s >= self._stream.heartbeat_s and not self._lock.locked():
            self._comment = asyncio.ensure_future(self.write(self._stream.heartbeat))
        self._timer = self._loop.call_later(self._period_s, self._check_timer)
