"""Connections as uvicorn's parser reads them: the head of a request is short, soon there, and HTTP/1.1.

Owns: the limits of a request's line and header fields, in bytes and in time, and the answer beyond them;
noticing that a client with several requests under way has left; reading on behind a head that offers
another protocol.
Does not know: routes, keys, or bodies, which have limits of their own; which other protocols exist.

No key is known yet, so these limits are what protects memory and connections from any client. uvicorn has no
such limit: its parser keeps a value that does not end, and copies it whenever more of it comes.

Some clients offer HTTP/2 with every request (`Upgrade: h2c`, as Java's own does). A server without it must
answer in HTTP/1.1, but the parser stops behind such a head and takes the body for the other protocol's.
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
"""Of a request's line and header fields; and of what stands between and behind the chunks of a body."""
HEAD_S: Final = 30.0
"""From the connection, or from the first byte of a later request, to the end of the head."""
MAX_AHEAD: Final = 8
"""Requests that are read while another is answered; behind more of them, or a long body, nobody sees a client
leave before the answer ends."""


class RequestHeadLimits(HttpToolsProtocol):
    """One connection whose request heads are limited in bytes and in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **kwargs)
        self._num_bytes = 0  # that are of no body, since a request began or a chunk of a body ended
        self._has_begun = False  # a request whose head has not ended
        self._is_body = False
        self._deadline: asyncio.TimerHandle | None = None
        self._earlier = deque[RequestResponseCycle]()  # than the last one, and not answered yet
        self._declines = False  # the offer of another protocol, whose head is read once more without it
        self.parser = NoUpgradeParser(self.parser, self, self._declined)  # type: ignore[assignment]

    # What uvicorn's loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A head is waited for."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is, and nobody is left to be answered: uvicorn tells the last request only."""
        self._stop_waiting()
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse no more at a time than a head may have left, so that none is ever held that is longer."""
        while data and self in self.connections and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._num_bytes
            if not room:
                sentence = f"The request's head has more than {MAX_HEAD_BYTES} bytes."
                self._refuse(ApiError(431, "head_too_large", sentence))
                return
            piece, data = data[:room], data[room:]
            self._num_bytes += len(piece)
            super().data_received(piece)
        if self._num_bytes and not self._is_body:  # empty lines before a request wake no other callback
            self._wait_for_head()

    # What the parser calls

    def on_message_begin(self) -> None:
        """Start the time limit of the head that begins."""
        self._has_begun = True
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the limits of the head, unless it offers another protocol and is read once more."""
        # A tunnel is asked for, and not offered.
        self._declines = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._declines:
            return
        self._num_bytes, self._has_begun, self._is_body = 0, False, True
        self._stop_waiting()
        earlier = self.cycle if self._is_answering else None
        super().on_headers_complete()
        if earlier is not None:
            self._earlier.append(earlier)
            if len(self.pipeline) <= MAX_AHEAD:  # who reads nothing does not see that a client leaves
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A body has limits elsewhere."""
        self._num_bytes = max(0, self._num_bytes - len(body))
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """A body of many small chunks has much between them."""
        self._num_bytes = 0

    def on_message_complete(self) -> None:
        """The next byte is another head's."""
        if self._declines:
            return
        self._num_bytes, self._is_body = 0, False
        super().on_message_complete()

    # What an answer calls

    def on_response_complete(self) -> None:
        """The next request's turn."""
        while self._earlier and self._earlier[0].response_complete:
            self._earlier.popleft()
        super().on_response_complete()

    # Inside

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
        if self._is_answering:  # the request before this one, whose client would lose its answer
            self._wait_for_head()
        elif self._has_begun:
            sentence = f"The request's head did not come within {HEAD_S:g} s."
            self._refuse(ApiError(408, "request_timeout", sentence))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless that would stand in the middle of another answer, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if not self._is_answering:
            body, phrase = encode_json(error.body), HTTPStatus(error.status).phrase.encode()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (error.status, phrase, len(body), body)
            )
        self.transport.close()


def head_without_upgrade(
    method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """A request's head as it would be without its offer; names of `headers` are in lower case."""
    fields = [b"%b: %b\r\n" % field for field in headers if field[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(fields))


class NoUpgradeParser:
    """The parser of one connection; what it lacks here it has from httptools."""

    def __init__(
        self, parser: httptools.HttpRequestParser, protocol: object, declined: Callable[[], bytes | None]
    ) -> None:
        """In place of `parser`, whose callbacks are `protocol`'s.

        `declined` is the head to be read in place of the one behind which the parser has stopped; None where
        that offered nothing, but asked for a tunnel: what comes with it is dropped.
        """
        self._parser = parser
        self._protocol = protocol
        self._declined = declined

    def feed_data(self, data: bytes) -> None:
        """Parse; raises what httptools raises, but no HttpParserUpgrade."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                head = self._declined()
                if head is None:
                    return
                data = head + data[stopped.args[0] :]
            # One that has stopped never reads on.
            self._parser = httptools.HttpRequestParser(cast(Any, self._protocol))
            with suppress(AttributeError):  # as uvicorn has it, for those that have it
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def __getattr__(self, name: str) -> Any:
        """What is known of the request."""
        return getattr(self._parser, name)
