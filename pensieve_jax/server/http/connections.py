"""Connections of uvicorn with limits on request heads, and without protocol upgrades.

Owns: the byte and time limits of the request line and header fields, and the error beyond them. It notices
that a client with pipelined requests has left, and parses on after a head that offers another protocol.
Does not know: routes, keys, which other protocols exist, or bodies, which have their own limits.
Called by uvicorn, for which `server.main` installs it.

These limits protect memory and connections before the client's key is known. uvicorn has no such limit: its
parser keeps a header value that never ends, and copies it whenever more of it arrives.

Some clients, such as Java's HttpClient, offer HTTP/2 with every request (`Upgrade: h2c`). A server without
HTTP/2 must answer in HTTP/1.1. But the parser stops after such a head and treats the body as data of the
other protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.replies import encode_json

MAX_HEAD_BYTES: Final = 64 * 2**10
"""Limit of the request line and header fields; also of the bytes between and after the chunks of a body."""
HEAD_S: Final = 30.0
"""Time limit of a head, from the connection or from the first byte of a later request."""
_PIECE_BYTES: Final = 4 * 2**10
"""Bytes parsed at a time outside bodies of known length. What a piece holds behind the end of a head or of a
chunk is not counted, so a longer piece would make the limit inexact."""
MAX_AHEAD: Final = 8
"""Requests that are read ahead while another one is answered. With more of them, or behind a long body, the
server notices that a client has left only after the response ends."""


class RequestHeadLimits(HttpToolsProtocol):
    """One connection whose request heads are limited in bytes and in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Wrap the parser that uvicorn makes; the arguments are uvicorn's."""
        super().__init__(*args, **kwargs)
        self._num_bytes = 0  # outside bodies, since a request began or a chunk of a body ended
        self._has_begun = False  # whether a head has begun and not ended
        self._is_body = self._is_chunked = False
        self._deadline: asyncio.TimerHandle | None = None
        self._earlier = deque[RequestResponseCycle]()  # unanswered requests before the last one
        # Whether the head offers another protocol and is parsed again without the offer.
        self._declines = False
        self.parser = NoUpgradeParser(self.parser, self, self._declined)  # type: ignore[assignment]

    # Called by uvicorn's event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and notify all unanswered requests; uvicorn notifies only the last one."""
        self._stop_waiting()
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data in pieces that fit into the head limit, so that no longer head is ever held."""
        while data and self in self.connections and not self.transport.is_closing():
            # A piece may hold uncounted bytes before the first counted ones; see `_PIECE_BYTES`.
            room = MAX_HEAD_BYTES - self._num_bytes - (_PIECE_BYTES if self._is_body else 0)
            if room <= 0:
                what = "has more than {} bytes between or behind its chunks" if self._is_body else None
                what = what or "has more than {} bytes before its body"
                sentence = f"The request {what.format(MAX_HEAD_BYTES)}."
                self._refuse(ApiError(431, "head_too_large", sentence))
                return
            if self._is_chunked or not self._is_body:
                room = min(room, _PIECE_BYTES)
            piece, data = data[:room], data[room:]
            self._num_bytes += len(piece)
            super().data_received(piece)
        if self._num_bytes and not self._is_body:  # empty lines before a request call no other callback
            self._wait_for_head()

    # Called by the parser

    def on_message_begin(self) -> None:
        """Start the time limit of the head that begins."""
        self._has_begun = True
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the limits of the head, unless it offers another protocol and is parsed again."""
        # CONNECT demands a tunnel instead of offering an upgrade.
        self._declines = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._declines:
            return
        self._num_bytes, self._has_begun, self._is_body = 0, False, True
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._stop_waiting()
        earlier = self.cycle if self._is_answering else None
        super().on_headers_complete()
        if earlier is not None:
            self._earlier.append(earlier)
            if len(self.pipeline) <= MAX_AHEAD:  # uvicorn notices a closed connection only while it reads
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Do not count body bytes for the head limit."""
        self._num_bytes = max(0, self._num_bytes - len(body))
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Restart the count, because a body of many small chunks has many bytes between them."""
        self._num_bytes = 0

    def on_message_complete(self) -> None:
        """Count from zero for the next head."""
        if self._declines:
            return
        self._num_bytes, self._is_body, self._is_chunked = 0, False, False
        super().on_message_complete()

    # Called by a response

    def on_response_complete(self) -> None:
        """Forget answered requests and let uvicorn start the next one."""
        while self._earlier and self._earlier[0].response_complete:
            self._earlier.popleft()
        super().on_response_complete()

    # Private methods

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _may_answer(self) -> bool:
        """Whether the next response is that of the request which is being read, and has not begun."""
        if not self._is_answering:
            return True
        return self._is_body and not self._earlier and not self.cycle.response_started

    def _declined(self) -> bytes | None:
        if not self._declines:
            return None
        parser = self.parser
        return head_without_upgrade(parser.get_method(), self.url, parser.get_http_version(), self.headers)

    def _wait_for_head(self) -> None:
        if self._deadline is None and self in self.connections:
            self._deadline = self.loop.call_later(HEAD_S, self._is_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self._is_answering:  # closing would lose the response of the request before
            self._wait_for_head()
        elif self._has_begun:
            sentence = f"The request's head did not arrive within {HEAD_S:g} s."
            self._refuse(ApiError(408, "request_timeout", sentence))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send the error, unless that would interrupt another response, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self._may_answer:
            body, phrase = encode_json(error.body), HTTPStatus(error.status).phrase.encode()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (error.status, phrase, len(body), body)
            )
        self.transport.close()


def head_without_upgrade(
    method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """Return a request's head without its Upgrade header; names in `headers` are in lower case."""
    fields = [b"%b: %b\r\n" % field for field in headers if field[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(fields))


class NoUpgradeParser:
    """A wrapper of the httptools parser of one connection that ignores protocol upgrades."""

    def __init__(
        self, parser: httptools.HttpRequestParser, protocol: object, declined: Callable[[], bytes | None]
    ) -> None:
        """Wrap `parser`, which calls the callbacks of `protocol`.

        `declined` returns the head to parse instead of the one after which the parser stopped. It returns
        None for a CONNECT request, whose remaining data is dropped.
        """
        self._parser = parser
        self._protocol = protocol
        self._declined = declined

    def feed_data(self, data: bytes) -> None:
        """Parse data; raise the errors of httptools except HttpParserUpgrade."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                head = self._declined()
                if head is None:
                    return
                data = head + data[stopped.args[0] :]
            # A parser that has stopped cannot be resumed.
            self._parser = httptools.HttpRequestParser(cast(Any, self._protocol))
            with suppress(AttributeError):  # as uvicorn sets it; old versions lack it
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the wrapped parser."""
        return getattr(self._parser, name)
