"""Where a front hears what comes of turns: streams of messages, over connections that replicas make.

Owns: who may connect, which stream a message belongs to, and what a loss means to each stream.
Does not know: Ray, what a message says, or what is done about a loss.

A stream belongs to the run that fed it first: where Serve sends a call twice, two replicas may run the same
turns for one stream, and the second is told that nobody reads it. So is whoever feeds a stream that was left.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from pensieve_jax.core.errors import EngineDiedError
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError
from pensieve_jax.server.replicas.report_link import Hello, ReplyTo, Said, Unread, notice_silence

_log = logging.getLogger(__name__)

_GONE: Final = "The connection to the replica is lost. What it had committed is kept."
_HELLO_S: Final = 5.0
_MAX_UNKNOWN: Final = 64
"""Connections that have not said the token yet."""
_MAX_UNKNOWN_BYTES: Final = 4096


class Inbox:
    """One stream, as the front reads it: messages in order, then an end or a loss."""

    def __init__(self, number: int, forget: Callable[[int], object]) -> None:
        self.number = number
        self._forget = forget
        self._messages: deque[bytes] = deque()
        self._error: Exception | None = None
        self._has_more = asyncio.Event()
        self._is_over = asyncio.Event()
        self._source: tuple[_Incoming, int] | None = None

    @property
    def has_ended(self) -> bool:
        """Nothing more comes; what has come may not have been taken."""
        return self._is_over.is_set()

    async def ended(self) -> None:
        """Wait until nothing more comes."""
        await self._is_over.wait()

    async def take(self) -> bytes | None:
        """The next message; None behind the last. Raises what the stream failed with."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return None
            self._has_more.clear()
            await self._has_more.wait()
        return self._messages.popleft()

    def feed(self, connection: _Incoming, run: int, message: bytes) -> bool:
        """A message, or an empty one for the end; False where the stream is another run's."""
        if self._source is None:
            self._source = connection, run
            connection.streams.add(self)
        if self._source != (connection, run):
            return False
        self.add(message)
        return True

    def add(self, message: bytes) -> None:
        """What came; an empty message is the end."""
        if self.has_ended:
            return
        if message:
            self._messages.append(message)
            self._has_more.set()
        else:
            self._end()

    def fail(self, error: Exception) -> None:
        """Nothing comes any more: raised behind what has come. Nothing happens to a stream that has ended."""
        if not self.has_ended:
            self._error = error
            self._end()

    def leave(self) -> None:
        """Nobody reads it any more."""
        self._messages.clear()
        if not self.has_ended:
            self._end()

    def drop_connection(self) -> None:
        """It stands and brings nothing: what else came over it fails, and the replica connects anew."""
        if self._source is not None:
            self._source[0].close()

    def _end(self) -> None:
        self._forget(self.number)
        if self._source is not None:
            self._source[0].streams.discard(self)
        self._is_over.set()
        self._has_more.set()


class ReportListener:
    """The front's side. Used by the thread of one event loop."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._inboxes: dict[int, Inbox] = {}
        self._last_number = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Incoming] = set()

    @property
    def num_unknown(self) -> int:
        """Connections that have not said the token."""
        return sum(not connection.is_known for connection in self._connections)

    async def listen(self, host: str) -> ReplyTo:
        """From now on; `host` is this machine's address as replicas reach it. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Incoming(self), host, 0)
        return ReplyTo(host, self._server.sockets[0].getsockname()[1], self._token)

    def close(self) -> None:
        """Every stream that is open fails."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        for inbox in list(self._inboxes.values()):
            inbox.fail(EngineDiedError(_GONE))

    def open(self) -> Inbox:
        """A new stream, whose number goes out with what is asked."""
        self._last_number += 1
        inbox = Inbox(self._last_number, self._inboxes.pop)
        self._inboxes[inbox.number] = inbox
        return inbox

    # For connections

    def is_ours(self, token: str) -> bool:
        """Whether whoever connects was told the token."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def feed(self, connection: _Incoming, number: int, run: int, message: bytes) -> bool:
        """What a run says on a stream; False where nobody reads that."""
        inbox = self._inboxes.get(number)
        return inbox is not None and inbox.feed(connection, run, message)

    def begin(self, connection: _Incoming) -> None:
        """Somebody has connected."""
        self._connections.add(connection)

    def end(self, connection: _Incoming) -> None:
        """And has gone."""
        self._connections.discard(connection)


class _Incoming(asyncio.Protocol):
    """One replica's connection, at the front.

    Attributes:
      is_known: it has said the token.
      streams: that are fed over it.
    """

    def __init__(self, listener: ReportListener) -> None:
        self._listener = listener
        self._frames, self._writer = FrameReader(Hello | Said), FrameWriter()
        self.is_known = False
        self._num_bytes = 0
        self._transport: Any = None
        self._deadline = asyncio.get_running_loop().call_later(_HELLO_S, self.close)
        self.streams: set[Inbox] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        notice_silence(transport)
        self._listener.begin(self)
        if self._listener.num_unknown > _MAX_UNKNOWN:
            self.close()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._take(message)
            self._num_bytes += len(data)
            if not self.is_known and self._num_bytes > _MAX_UNKNOWN_BYTES:
                raise WireError("It says too much before this front's token.")
        except WireError as error:
            _log.warning("a connection that is no replica's, or of another release: %s", error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.end(self)
        self._deadline.cancel()
        for inbox in list(self.streams):
            inbox.fail(EngineDiedError(_GONE))

    def close(self) -> None:
        self._transport.abort()

    def _take(self, message: Hello | Said) -> None:
        if isinstance(message, Hello) and self._listener.is_ours(message.token):
            self.is_known = True
            self._deadline.cancel()
        if not self.is_known:
            raise WireError("It does not begin with this front's token.")
        if isinstance(message, Said):
            for number, run, line in message.messages:
                if not self._listener.feed(self, number, run, line) and line:
                    self._transport.write(self._writer.frame(Unread(run)))
