"""What comes of turns on its way from a replica to the front that sent them: one connection for all of them.

Owns: the connection, its frames, which stream a message belongs to, and what a loss means to each stream.
Does not know: Ray, what a message says, or what is done about a loss.
Called by: `serve_app`, whose front listens and whose replicas connect.

A message through Ray costs both processes half a millisecond, and a token is worth a tenth of that. So Ray
carries what is asked, once for each turn, and the pieces of replies come here: whatever several turns have to
say at a time is one frame.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec

from pensieve_jax.core.errors import EngineDiedError, PensieveError
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError

_log = logging.getLogger(__name__)

_GONE: Final = "The connection to the replica is lost. What it had committed is kept."
_CONNECT_S: Final = 10.0
_MAX_UNKNOWN_BYTES: Final = 4096
"""Of whoever has not said the token yet."""


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


class Said(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Messages, each with the number of its stream; an empty one is the last of its stream."""

    messages: list[tuple[int, bytes]]


class FrontLostError(PensieveError):
    """The front that sent turns cannot be reached any more: nobody waits for what comes of them."""


class Inbox:
    """One stream, as the front reads it: messages in order, then an end or a loss."""

    def __init__(self, listener: ReportListener, number: int) -> None:
        """Made by `ReportListener.open`."""
        self.number = number
        self._listener = listener
        self._messages: deque[bytes] = deque()
        self._error: Exception | None = None
        self._has_more = asyncio.Event()
        self._is_over = asyncio.Event()

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

    def _end(self) -> None:
        self._listener.forget(self.number)
        self._is_over.set()
        self._has_more.set()


class ReportListener:
    """The front's side. Used by the thread of one event loop."""

    def __init__(self) -> None:
        """Not listening yet."""
        self._token = secrets.token_hex(16)
        self._inboxes: dict[int, Inbox] = {}
        self._last_number = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Incoming] = set()

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
        inbox = self._inboxes[self._last_number] = Inbox(self, self._last_number)
        return inbox

    def forget(self, number: int) -> None:
        """Nobody reads this stream any more."""
        self._inboxes.pop(number, None)

    # For connections

    def is_ours(self, token: str) -> bool:
        """Whether whoever connects was told the token."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def inbox(self, number: int) -> Inbox | None:
        """Of a stream that somebody reads."""
        return self._inboxes.get(number)

    def begin(self, connection: _Incoming) -> None:
        """A replica has connected."""
        self._connections.add(connection)

    def end(self, connection: _Incoming) -> None:
        """It has gone."""
        self._connections.discard(connection)


class _Incoming(asyncio.Protocol):
    """One replica's connection, at the front."""

    def __init__(self, listener: ReportListener) -> None:
        self._listener = listener
        self._frames = FrameReader(Hello | Said)
        self._is_known = False
        self._num_bytes = 0
        self._fed: set[int] = set()  # streams that began here and have not ended
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._listener.begin(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._take(message)
            self._num_bytes += len(data)
            if not self._is_known and self._num_bytes > _MAX_UNKNOWN_BYTES:
                raise WireError("It says too much before this front's token.")
        except WireError as error:
            _log.warning("a connection that is no replica's, or of another release: %s", error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.end(self)
        for number in list(self._fed):
            if (inbox := self._listener.inbox(number)) is not None:
                inbox.fail(EngineDiedError(_GONE))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take(self, message: Hello | Said) -> None:
        if isinstance(message, Hello):
            self._is_known = self._listener.is_ours(message.token)
        if not self._is_known:
            raise WireError("It does not begin with this front's token.")
        if isinstance(message, Said):
            for number, line in message.messages:
                self._feed(number, line)

    def _feed(self, number: int, line: bytes) -> None:
        inbox = self._listener.inbox(number)
        if inbox is None:  # nobody reads it any more
            self._fed.discard(number)
            return
        (self._fed.add if line else self._fed.discard)(number)
        inbox.add(line)


class ReportLinks:
    """The replica's side: a connection to each front that has turns here."""

    def __init__(self) -> None:
        """There is none yet."""
        self._links: dict[ReplyTo, asyncio.Task[ReportLink]] = {}

    async def to(self, front: ReplyTo) -> ReportLink:
        """A connection that stands; raises FrontLostError where the front cannot be reached."""
        opening = self._links.get(front)
        if opening is not None and opening.done() and (opening.exception() or opening.result().is_lost):
            opening = None
        if opening is None:
            opening = self._links[front] = asyncio.ensure_future(ReportLink.open(front))
        return await asyncio.shield(opening)

    def close(self) -> None:
        """All of them, once what was sent is on its way."""
        for opening in self._links.values():
            if opening.done() and not opening.exception():
                opening.result().close()
            else:
                opening.cancel()
        self._links.clear()


class ReportLink(asyncio.Protocol):
    """One connection to a front, which many turns share."""

    def __init__(self) -> None:
        """Not connected; see `open`."""
        self.is_lost = False
        self._writer = FrameWriter()
        self._messages: list[tuple[int, bytes]] = []
        self._transport: Any = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, front: ReplyTo) -> ReportLink:
        """Connect; raises FrontLostError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, link = await loop.create_connection(cls, front.host, front.port)
        except OSError as error:  # a TimeoutError is one
            where = f"{front.host}:{front.port}"
            raise FrontLostError(f"The front at {where} cannot be reached: {error}.") from error
        link._transport.write(link._writer.frame(Hello(front.token)))
        return link

    async def send(self, number: int, message: bytes) -> None:
        """A message of a stream, an empty one for its end; waits while the front takes nothing.

        Raises FrontLostError where the front is gone.
        """
        await self._may_write.wait()
        if self.is_lost:
            raise FrontLostError("The front that sent this turn is gone.")
        if not self._messages:
            self._loop.call_soon(self._flush)
        self._messages.append((number, message))

    def close(self) -> None:
        """Once what was sent has left."""
        self._flush()
        self._transport.close()

    # Of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """The front is gone, or this end has closed it."""
        self.is_lost = True
        self._may_write.set()

    def pause_writing(self) -> None:
        """The front does not take what it is sent."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """It does again."""
        self._may_write.set()

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if messages and not self.is_lost:
            self._transport.write(self._writer.frame(Said(messages)))
