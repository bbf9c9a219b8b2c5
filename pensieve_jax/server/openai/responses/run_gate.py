"""Which background responses may run beside which, so that a death of the engine has one suspect.

Owns: the places of running responses, and the order in which others wait for them.
Does not know: why a response runs alone, or how it runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple


class _Waiting(NamedTuple):
    place: asyncio.Future[None]
    alone: bool


class RunGate:
    """Places for responses that run together, or one alone. Used by the event loop's thread only.

    First come, first served: no later response overtakes one that waits to run alone, so that one begins once
    those that run have ended.
    """

    def __init__(self) -> None:
        self._num_running = 0
        self._is_one_alone = False
        self._waiting: deque[_Waiting] = deque()

    @asynccontextmanager
    async def place(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a place and hold it for a block: beside others, or with no other."""
        if self._waiting or not self._has_room(alone):
            await self._wait(alone)
        else:
            self._take(alone)
        try:
            yield
        finally:
            self._leave()

    def _has_room(self, alone: bool) -> bool:
        return not self._num_running or not (alone or self._is_one_alone)

    def _take(self, alone: bool) -> None:
        self._num_running += 1
        self._is_one_alone = alone

    async def _wait(self, alone: bool) -> None:
        waiting = _Waiting(asyncio.get_running_loop().create_future(), alone)
        self._waiting.append(waiting)
        try:
            await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():  # it got its place at the same moment
                self._leave()
            else:
                if waiting in self._waiting:  # `_admit` may have removed it
                    self._waiting.remove(waiting)
                self._admit()
            raise

    def _leave(self) -> None:
        self._num_running -= 1
        self._is_one_alone = False
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            place, alone = self._waiting[0]
            if place.cancelled():  # `_wait` removes it soon
                self._waiting.popleft()
                continue
            if not self._has_room(alone):
                return
            self._waiting.popleft()
            self._take(alone)
            place.set_result(None)
