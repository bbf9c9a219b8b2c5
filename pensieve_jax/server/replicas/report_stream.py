"""Carries the reports of turns from a replica to a front end, over one TCP connection for all turns.

Owns: the frames of both sides, the replica's connections, the detection of dead peers, authentication at the
front end, the routing of messages to streams, and the failure of streams whose connection is lost.
Does not know: Ray, the content of messages, the readers, or how they handle a loss.

A message through Ray costs both processes many times its content. Therefore Ray carries only the requests,
one per submission, and the parts of replies use this connection: the current output of several turns is one
frame.

A stream belongs to the run that sent its first message. If Serve sends a call twice, two replicas may run the
same turns for one stream. The front end then tells the second run that its stream is closed. A run whose
stream was closed by its reader gets the same message.
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
"""Time without an acknowledgement after which a peer counts as lost, even if no packet reports it."""
_GONE: Final = "The connection to the replica is lost. Committed turns are stored."
_HELLO_S: Final = 5.0
_MAX_UNKNOWN: Final = 64
"""Limit of connections that have not sent the token yet."""
_MAX_UNKNOWN_BYTES: Final = 4096


class ReplyTo(NamedTuple):
    """Address at which a front end listens for reports.

    Attributes:
      host, port: the address that every replica can reach.
      token: the secret that authenticates a replica's connection.
    """

    host: str
    port: int
    token: str


class Hello(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """First frame of a connection."""

    token: str


class ReportFrame(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Messages with their stream and run numbers. An empty message ends its stream."""

    messages: list[tuple[int, int, bytes]]


class StreamClosed(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Frame from the front end: messages of this run are not read any more."""

    run: int


class FrontLostError(PensieveError):
    """The front end that sent turns cannot be reached, or has closed their stream."""


class ReportLinks:
    """Connections of a replica to the front ends that have turns on it."""

    def __init__(self) -> None:
        """Start without connections; `to` opens them."""
        self._links: dict[ReplyTo, asyncio.Task[ReportLink]] = {}

    async def to(self, front: ReplyTo) -> ReportLink:
        """Return an open connection; raises FrontLostError if the front end cannot be reached."""
        self._links = {where: link for where, link in self._links.items() if not _is_over(link)}
        if front not in self._links:
            self._links[front] = asyncio.ensure_future(ReportLink.open(front))
        return await asyncio.shield(self._links[front])  # other callers wait for the same task

    def close(self) -> None:
        """Close all connections after sending their queued messages."""
        for link in self._links.values():
            if not link.done():
                link.cancel()
            elif not _is_over(link):
                link.result().close()
        self._links.clear()


def _is_over(link: asyncio.Task[ReportLink]) -> bool:
    """Return whether a connection failed to open or was lost."""
    return link.done() and (link.cancelled() or link.exception() is not None or link.result().is_lost)


class ReportLink(asyncio.Protocol):
    """Connection to one front end, shared by many turns."""

    def __init__(self) -> None:
        """Create an unconnected link; use `open` instead."""
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
        """Connect to a front end and send its token; raises FrontLostError if it cannot be reached."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, link = await loop.create_connection(cls, front.host, front.port)
        except OSError as error:  # a TimeoutError is one
            where = f"{front.host}:{front.port}"
            raise FrontLostError(f"The front end at {where} cannot be reached: {error!r}.") from error
        link._transport.write(link._writer.frame(Hello(front.token)))
        return link

    @contextmanager
    def stream(self, number: int) -> Iterator[OutStream]:
        """Open a run that sends to a stream of the front end, until the block is left."""
        self._last_run = run = self._last_run + 1
        self._open_runs.add(run)
        try:
            yield OutStream(self, number, run)
        finally:
            self._open_runs.discard(run)

    def close(self) -> None:
        """Close the connection after sending the queued messages."""
        self._flush()
        self._transport.close()

    # Called by streams

    async def send(self, number: int, run: int, message: bytes) -> None:
        """Queue a message once the front end accepts data.

        Raises FrontLostError if the front end is gone or has closed the stream.
        """
        await self._may_write.wait()
        if self.is_lost:
            raise FrontLostError("The front end that sent this turn is gone.")
        if run not in self._open_runs:
            raise FrontLostError("The front end closed the result stream of this turn.")
        if not self._messages:
            self._loop.call_soon(self._flush)
        self._messages.append((number, run, message))

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, and let the system detect a lost front end."""
        self._transport = transport
        notice_silence(transport)

    def data_received(self, data: bytes) -> None:
        """Close the runs whose streams the front end has closed."""
        try:
            for message in self._frames.feed(data):
                self._open_runs.discard(message.run)
        except WireError as error:
            _log.warning("a front end sent an invalid message; is it of another release? %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Wake all senders; the front end is gone, or this side has closed the connection."""
        self.is_lost = True
        self._may_write.set()

    def pause_writing(self) -> None:
        """Let `send` wait, because the front end does not read fast enough."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Let `send` continue, because the front end reads again."""
        self._may_write.set()

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if not messages or self.is_lost:
            return
        try:
            self._transport.write(self._writer.frame(ReportFrame(messages)))
        except WireError as error:  # too long for a frame; its streams cannot continue without it
            _log.error("%s", error)
            self._transport.abort()


class OutStream:
    """Sender of one run's messages to one stream of a front end."""

    def __init__(self, link: ReportLink, number: int, run: int) -> None:
        """Use `ReportLink.stream` instead of calling this."""
        self._link, self._number, self._run = link, number, run

    async def send(self, message: bytes) -> None:
        """Send a message, or an empty one for the end; waits while the front end does not read.

        Raises FrontLostError if the front end is gone or has closed the stream.
        """
        await self._link.send(self._number, self._run, message)


def notice_silence(transport: asyncio.BaseTransport) -> None:
    """Let the system detect a lost peer, even while no data is sent."""
    connection: socket.socket = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 1000 * _SILENT_S}
    for name, value in options.items():  # some systems lack some of them
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Inbox:
    """Received part of one stream at the front end: messages in order, then the end or an error."""

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
        """Whether no more messages arrive. Received messages may still be unread."""
        return self._is_over.is_set()

    async def ended(self) -> None:
        """Wait until no more messages arrive."""
        await self._is_over.wait()

    async def take(self) -> bytes | None:
        """Return the next message, or None after the last one; raises the stream's error."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return None
            self._has_more.clear()
            await self._has_more.wait()
        return self._messages.popleft()

    def feed(self, connection: _Incoming, run: int, message: bytes) -> bool:
        """Add a message, or an empty one for the end; return False if the stream belongs to another run."""
        if self._source is None:
            self._source = connection, run
            connection.streams.add(self)
        if self._source != (connection, run):
            return False
        self.add(message)
        return True

    def add(self, message: bytes) -> None:
        """Add a received message; an empty message ends the stream."""
        if self.has_ended:
            return
        if message:
            self._messages.append(message)
            self._has_more.set()
        else:
            self._end()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which is raised after the received messages were read.

        A stream that has ended is unaffected.
        """
        if not self.has_ended:
            self._error = error
            self._end()

    def close(self) -> None:
        """Close the stream as its reader, and discard unread messages."""
        self._messages.clear()
        if not self.has_ended:
            self._end()

    def drop_connection(self) -> None:
        """Close the stream's connection, which delivers nothing although it is open.

        All streams of the connection fail, and the replica connects again.
        """
        if self._source is not None:
            self._source[0].close()

    def _end(self) -> None:
        self._forget(self.number)
        if self._source is not None:
            self._source[0].streams.discard(self)
        self._is_over.set()
        self._has_more.set()


class ReportListener:
    """Listener of the front end for reports. Use it from one event loop only."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._inboxes: dict[int, Inbox] = {}
        self._last_number = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Incoming] = set()

    @property
    def num_unknown(self) -> int:
        """Number of connections that have not sent the token."""
        return sum(not connection.is_known for connection in self._connections)

    async def listen(self, host: str) -> ReplyTo:
        """Start to listen; `host` is the address at which replicas reach this machine. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Incoming(self), host, 0)
        return ReplyTo(host, self._server.sockets[0].getsockname()[1], self._token)

    def close(self) -> None:
        """Stop listening, close the connections, and fail every open stream."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        for inbox in list(self._inboxes.values()):
            inbox.fail(EngineDiedError(_GONE))

    def open(self) -> Inbox:
        """Open a new stream, whose number the caller sends with its request."""
        self._last_number += 1
        inbox = Inbox(self._last_number, self._inboxes.pop)
        self._inboxes[inbox.number] = inbox
        return inbox

    # Called by connections

    def is_ours(self, token: str) -> bool:
        """Return whether `token` is the token of this listener."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def feed(self, connection: _Incoming, number: int, run: int, message: bytes) -> bool:
        """Deliver a run's message to a stream; return False if the run's messages are not read."""
        inbox = self._inboxes.get(number)
        return inbox is not None and inbox.feed(connection, run, message)

    def begin(self, connection: _Incoming) -> None:
        """Register a new connection, which has not sent the token yet."""
        self._connections.add(connection)

    def end(self, connection: _Incoming) -> None:
        """Forget a connection that was lost."""
        self._connections.discard(connection)


class _Incoming(asyncio.Protocol):
    """Connection of one replica, at the front end.

    Attributes:
      is_known: whether it has sent the token.
      streams: the streams that receive messages over it.
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
                raise WireError("It sent too much data before the token of this front end.")
        except WireError as error:
            _log.warning("a connection is not from a replica of this release: %s", error)
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
            raise WireError("It does not begin with the token of this front end.")
        if isinstance(message, ReportFrame):
            for number, run, payload in message.messages:
                if not self._listener.feed(self, number, run, payload) and payload:
                    self._transport.write(self._writer.frame(StreamClosed(run)))
