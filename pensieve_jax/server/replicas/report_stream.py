"""What comes of turns on its way to the front that sent them: one connection for all turns of a replica.

Owns: the frames of both ends; the replica's connections, and what keeps them from being dead unnoticed; who
may connect to a front, which stream a message belongs to, and what a loss means to each stream.
Does not know: Ray, what a message says, who reads it, or what is done about a loss.

A message through Ray costs both processes many times what is in it. So Ray carries what is asked, once for
each turn, and the pieces of replies come here: whatever several turns have to say at a time is one frame.

A stream belongs to the run that fed it first: where Serve sends a call twice, two replicas may run the same
turns for one stream, and the second is told that its stream is not read. So is one that feeds a stream which
was left.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec

from pensieve_jax.core.errors import EngineDiedError, PensieveError
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError

_log = logging.getLogger(__name__)

_CONNECT_S: Final = 10.0
_SILENT_S: Final = 20
"""After which a peer that acknowledges nothing is gone, also where no packet says so."""
_GONE: Final = "The connection to the replica is lost. What it had committed is kept."
_HELLO_S: Final = 5.0
_MAX_UNKNOWN: Final = 64
"""Connections that have not said the token yet."""
_MAX_UNKNOWN_BYTES: Final = 4096


class ReplyTo(NamedTuple):
    """Where a front listens.

    Attributes:
      host, port: as any replica reaches it.
      token: that makes a connection a replica's.
    """

    host: str
    port: int
    token: str


class Hello(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The first frame of a connection."""

    token: str


class ReportFrame(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Messages, each with its stream and its run; an empty one is the last of its stream."""

    messages: list[tuple[int, int, bytes]]


class StreamClosed(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """From the front: nobody reads what this run says."""

    run: int


class FrontLostError(PensieveError):
    """The front that sent turns cannot be reached, or does not read any more what comes of them."""


class ReportLinks:
    """The replica's side: a connection to each front that has turns here."""

    def __init__(self) -> None:
        """There is none yet."""
        self._links: dict[ReplyTo, asyncio.Task[ReportLink]] = {}

    async def to(self, front: ReplyTo) -> ReportLink:
        """A connection that stands; raises FrontLostError where the front cannot be reached."""
        self._links = {where: link for where, link in self._links.items() if not _is_over(link)}
        if front not in self._links:
            self._links[front] = asyncio.ensure_future(ReportLink.open(front))
        return await asyncio.shield(self._links[front])  # others wait for the same

    def close(self) -> None:
        """All of them, once what was sent is on its way."""
        for link in self._links.values():
            if not link.done():
                link.cancel()
            elif not _is_over(link):
                link.result().close()
        self._links.clear()


def _is_over(link: asyncio.Task[ReportLink]) -> bool:
    """It was tried in vain, or is lost."""
    return link.done() and (link.cancelled() or link.exception() is not None or link.result().is_lost)


class ReportLink(asyncio.Protocol):
    """One connection to a front, which many turns share."""

    def __init__(self) -> None:
        """Not connected; see `open`."""
        self.is_lost = False
        self._frames, self._writer = FrameReader(StreamClosed), FrameWriter()
        self._messages: list[tuple[int, int, bytes]] = []
        self._transport: Any = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._loop = asyncio.get_running_loop()
        self._last_run = 0
        self._open_runs: set[int] = set()

    @classmethod
    async def open(cls, front: ReplyTo) -> ReportLink:
        """Connect to a front and send its token; raise FrontLostError if it cannot be reached."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, link = await loop.create_connection(cls, front.host, front.port)
        except OSError as error:  # a TimeoutError is one
            where = f"{front.host}:{front.port}"
            raise FrontLostError(f"The front at {where} cannot be reached: {error!r}.") from error
        link._transport.write(link._writer.frame(Hello(front.token)))
        return link

    @contextmanager
    def stream(self, number: int) -> Iterator[OutStream]:
        """What a new run says to a stream of the front, until the block is left."""
        self._last_run = run = self._last_run + 1
        self._open_runs.add(run)
        try:
            yield OutStream(self, number, run)
        finally:
            self._open_runs.discard(run)

    def close(self) -> None:
        """Once what was sent has left."""
        self._flush()
        self._transport.close()

    # For streams

    async def send(self, number: int, run: int, message: bytes) -> None:
        """Queue a message once the front takes more; raise FrontLostError if it is gone or reads no more."""
        await self._may_write.wait()
        if self.is_lost:
            raise FrontLostError("The front that sent this turn is gone.")
        if run not in self._open_runs:
            raise FrontLostError("The front does not read any more what comes of this turn.")
        if not self._messages:
            self._loop.call_soon(self._flush)
        self._messages.append((number, run, message))

    # Of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and let the system notice when the front is gone."""
        self._transport = transport
        notice_silence(transport)

    def data_received(self, data: bytes) -> None:
        """The front has left streams."""
        try:
            for message in self._frames.feed(data):
                self._open_runs.discard(message.run)
        except WireError as error:
            _log.warning("a front of another release: %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The front is gone, or this end has closed it."""
        self.is_lost = True
        self._may_write.set()

    def pause_writing(self) -> None:
        """The front does not take what it is sent."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Let `send` continue: the front takes data again."""
        self._may_write.set()

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if not messages or self.is_lost:
            return
        try:
            self._transport.write(self._writer.frame(ReportFrame(messages)))
        except WireError as error:  # too long for a frame: its streams cannot go on without it
            _log.error("%s", error)
            self._transport.abort()


class OutStream:
    """One run's messages to one stream of a front."""

    def __init__(self, link: ReportLink, number: int, run: int) -> None:
        """Use `ReportLink.stream` instead of calling this."""
        self._link, self._number, self._run = link, number, run

    async def send(self, message: bytes) -> None:
        """A message, or an empty one for the end; waits while the front takes nothing.

        Raises FrontLostError where the front is gone, or reads this no more.
        """
        await self._link.send(self._number, self._run, message)


def notice_silence(transport: asyncio.BaseTransport) -> None:
    """Have the system look whether the other end is there, also while nothing is sent."""
    found: socket.socket = transport.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 1000 * _SILENT_S}
    for name, value in options.items():  # as far as this system has them
        if (option := getattr(socket, name, None)) is not None:
            found.setsockopt(socket.IPPROTO_TCP, option, value)


class Inbox:
    """One stream, as the front reads it: messages in order, then an end or a loss."""

    def __init__(self, number: int, forget: Callable[[int], object]) -> None:
        """Use `ReportListener.open` instead of calling this."""
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
        """Register a new connection, which has not sent the token yet."""
        self._connections.add(connection)

    def end(self, connection: _Incoming) -> None:
        """Forget a connection that was lost."""
        self._connections.discard(connection)


class _Incoming(asyncio.Protocol):
    """One replica's connection, at the front.

    Attributes:
      is_known: it has said the token.
      streams: that are fed over it.
    """

    def __init__(self, listener: ReportListener) -> None:
        self._listener = listener
        self._frames, self._writer = FrameReader(Hello | ReportFrame), FrameWriter()
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

    def _take(self, message: Hello | ReportFrame) -> None:
        if isinstance(message, Hello) and self._listener.is_ours(message.token):
            self.is_known = True
            self._deadline.cancel()
        if not self.is_known:
            raise WireError("It does not begin with this front's token.")
        if isinstance(message, ReportFrame):
            for number, run, line in message.messages:
                if not self._listener.feed(self, number, run, line) and line:
                    self._transport.write(self._writer.frame(StreamClosed(run)))
