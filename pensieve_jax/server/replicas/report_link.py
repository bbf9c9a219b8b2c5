"""What comes of turns on its way to the front that sent them: one connection for all turns of a replica.

Owns: the frames of both ends, the replica's connections, and what keeps them from being dead unnoticed.
Does not know: Ray, what a message says, or who reads it.

A message through Ray costs both processes many times what is in it. So Ray carries what is asked, once for
each turn, and the pieces of replies come here: whatever several turns have to say at a time is one frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError

_log = logging.getLogger(__name__)

_CONNECT_S: Final = 10.0
_SILENT_S: Final = 20
"""After which a peer that acknowledges nothing is gone, also where no packet says so."""


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
    """Messages, each with its stream and its run; an empty one is the last of its stream."""

    messages: list[tuple[int, int, bytes]]


class Unread(msgspec.Struct, array_like=True, tag=True, frozen=True):
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
        self._frames, self._writer = FrameReader(Unread), FrameWriter()
        self._messages: list[tuple[int, int, bytes]] = []
        self._transport: Any = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._loop = asyncio.get_running_loop()
        self._last_run = 0
        self._open_runs: set[int] = set()

    @classmethod
    async def open(cls, front: ReplyTo) -> ReportLink:
        """Connect; raises FrontLostError."""
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
        """See `OutStream.send`."""
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
        """It stands."""
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
        """It does again."""
        self._may_write.set()

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if not messages or self.is_lost:
            return
        try:
            self._transport.write(self._writer.frame(Said(messages)))
        except WireError as error:  # too long for a frame: its streams cannot go on without it
            _log.error("%s", error)
            self._transport.abort()


class OutStream:
    """One run's messages to one stream of a front."""

    def __init__(self, link: ReportLink, number: int, run: int) -> None:
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
