"""A client of a completions API: streams on keep-alive connections; each turn names its predecessor's id.

Owns: connections, and what a benchmark reads of a stream: the time of its first token, and its last events.
Does not know: which server answers, users, or figures.

It runs in one thread with its own event loop. Events in the middle of a stream are counted, not parsed: a
client that parses every delta uses more CPU than the server that sends it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httptools

from pensieve_jax import PensieveError

_EVENT_END = b"\n\n"
_KEPT = 3  # number of last events that are parsed, among them usage and [DONE]
_KEPT_BYTES = 8_192  # more than their size


class HttpError(PensieveError):
    """The server refused a turn, or its stream ended too soon."""


class RequestTiming(NamedTuple):
    """Timing of a request.

    Attributes:
      first_s, end_s: readings of `time.perf_counter` at the first event with a token and at the end.
      events: number of events.
      last: last events, parsed; the whole answer if it was not streamed.
    """

    first_s: float
    end_s: float
    events: int
    last: list[Any]


class _Connection(asyncio.Protocol):
    """Connection with one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[RequestTiming] | None = None
        self._body = bytearray()
        self._first_s = 0.0
        self._events = 0
        self.usable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._fail(HttpError("The connection ended before its answer did."))

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._body.clear()
        self._first_s, self._events = 0.0, 0

    def on_body(self, body: bytes) -> None:
        if not self._first_s:
            self._first_s = time.perf_counter()
        self._events += body.count(_EVENT_END)
        self._body += body
        if self._events and len(self._body) > 2 * _KEPT_BYTES:
            del self._body[:-_KEPT_BYTES]

    def on_message_complete(self) -> None:
        waiter, self._waiter = self._waiter, None
        self.usable = self.usable and self._parser.should_keep_alive()
        if waiter is None or waiter.done():
            return
        if self._parser.get_status_code() != 200:
            waiter.set_exception(HttpError(self._body.decode(errors="replace")[:500]))
            return
        end_s = time.perf_counter()
        data = [part[5:].strip() for part in self._body.split(_EVENT_END) if part.startswith(b"data:")]
        whole = data[-_KEPT:] if data else [bytes(self._body)]
        last = [json.loads(part) for part in whole if part != b"[DONE]"]
        waiter.set_result(RequestTiming(self._first_s, end_s, self._events, last))

    async def ask(self, request: bytes) -> RequestTiming:
        assert self._transport is not None and self._waiter is None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiter

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: HttpError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self._waiter = None


class HttpClient:
    """HTTP client of one server, used within one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[_Connection] = []
        self._all: list[_Connection] = []

    async def post(self, path: str, body: dict[str, Any]) -> RequestTiming:
        """Send a request and wait for its whole answer; raises HttpError."""
        content = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection = await self._connection()
        timing = await connection.ask(head.encode() + content)
        if connection.usable:
            self._idle.append(connection)
        return timing

    async def get(self, path: str) -> RequestTiming:
        """Send a request without a body; otherwise like `post`."""
        connection = await self._connection()
        timing = await connection.ask(
            f"GET {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n\r\n".encode()
        )
        if connection.usable:
            self._idle.append(connection)
        return timing

    async def close(self) -> None:
        for connection in self._all:
            connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        make: Callable[[], _Connection] = _Connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(make, self._host, self._port)
        self._all.append(connection)
        return connection
