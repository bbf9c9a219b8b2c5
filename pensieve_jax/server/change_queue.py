"""Changes of the history on their way to the engine, whose owners are served in turn.

Owns: how many changes the engine has at a time, and which one is sent next.
Does not know: what a change does, or how it is sent.

The engine makes changes in the order of their arrival, between two steps. Without this queue, one owner's
thousand changes would come before another owner's one, and hold up a step until all of them are made. Large
changes hold up a step by themselves, so they go one at a time, with pauses for the steps.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from pensieve_jax.core.errors import EngineClosedError
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    CreateConversation,
    Expire,
    HistoryChange,
    QueueResponse,
)
from pensieve_jax.history.stored_amounts import ROW_BYTES
from pensieve_jax.server.fair_queue import FairQueue

MAX_SENT: Final = 16
"""Small changes that the engine has at a time. They take some ten milliseconds on a local disk."""
LARGE_BYTES: Final = 256 * 1024
"""Cost above which a change is large."""
WAIT_S: Final = 30.0
"""Time after which a change that was not sent is given up, as the engine's answer to one that was."""
_PAUSES: Final = 3.0  # times as long as a large change took, no other is made
_MAX_PAUSE_S: Final = 5.0  # less than `WAIT_S`, so that one slow change refuses no other


class Changeable(Protocol):
    """What makes changes of the history: an engine."""

    async def apply(self, change: HistoryChange) -> None:
        """Make a change; raise its error."""
        ...


class ChangeQueue:
    """The changes of one server. Used by the event loop's thread only."""

    def __init__(self, engine: Changeable, *, wait_s: float = WAIT_S) -> None:
        """Send changes to `engine`; each waits up to `wait_s` seconds until it is sent."""
        self._engine = engine
        self._small = _Lane(MAX_SENT, wait_s)
        self._large = _Lane(1, wait_s)

    @property
    def num_sent(self) -> int:
        """Number of changes that the engine has, with a large one whose pause has not ended."""
        return self._small.num_sent + self._large.num_sent

    @property
    def num_waiting(self) -> int:
        """Number of changes that wait to be sent."""
        return self._small.num_waiting + self._large.num_waiting

    async def apply(self, change: HistoryChange) -> None:
        """Make a change when it is its owner's turn.

        Raises what the engine raises, and EngineClosedError if the change waited too long and was not made. A
        change that is cancelled while it waits is not made.
        """
        owner, cost = "" if isinstance(change, Expire) else change.owner, cost_of(change)
        lane = self._small if cost <= LARGE_BYTES else self._large
        await lane.enter(owner, cost)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self._engine.apply(change)
        finally:
            if lane is self._large:
                loop.call_later(min(_PAUSES * (loop.time() - began_s), _MAX_PAUSE_S), lane.leave)
            else:
                lane.leave()


class _Lane:
    """Changes of about the same size: some are at the engine, the others wait.

    Attributes:
      num_sent: how many places are taken.
    """

    def __init__(self, max_sent: int, wait_s: float) -> None:
        self.num_sent = 0
        self._max_sent = max_sent
        self._wait_s = wait_s
        self._queue = FairQueue[asyncio.Future[None]]()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def enter(self, owner: str, cost: float) -> None:
        """Wait for one of the places, which the caller must return."""
        if self.num_sent < self._max_sent:
            self.num_sent += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.add(owner, place, cost)
        try:
            async with asyncio.timeout(self._wait_s):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self.leave()
            self._queue.remove(owner, place)
            if isinstance(error, TimeoutError):
                sentence = f"The change has waited for {self._wait_s:g} s and was not made; try again."
                raise EngineClosedError(sentence) from None
            raise

    def leave(self) -> None:
        """Return a place, and give it to the next change."""
        self.num_sent -= 1
        while self.num_sent < self._max_sent and len(self._queue):
            place = self._queue.take()
            if not place.done():  # a cancelled one is still in the queue
                self.num_sent += 1
                place.set_result(None)


def cost_of(change: HistoryChange) -> int:
    """Return the bytes that a change is taken to write."""
    match change:
        case AppendItems(items=items) | CreateConversation(items=items):
            return ROW_BYTES + len(items)
        case QueueResponse(draft=draft, job=job):
            return ROW_BYTES + len(draft.input_items) + len(job)
        case _:
            return ROW_BYTES
