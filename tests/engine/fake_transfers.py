"""Copies between the fake runner's pages and a host pool: slow, out of order, and checking how they are used.

Errors that rarely show on a device always show here. The page of a swap-in is poison from its start until it
completes, and so is the slot of a swap-out; the host is read at any moment in between. Using a page or a slot
of a copy in flight, or a slot without valid content, is an assertion error.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.engine.transfers import Ended

POISON_64 = np.uint64(0xDEADBEEFDEADBEEF)
MAX_DELAY = 40  # calls of `completed` that delay a copy; occasionally ten times as many


@dataclass(frozen=True)
class Delays:
    """Durations of copies: seeded, so that a scenario is reproducible.

    Attributes:
        laziness: probability that a copy is delayed again, each time that it could complete; with 0 all
            complete at the first opportunity, in order.
        unfit: share of chunks, by the content of their pages, that cannot be packed: their copies out are
    lost.
    """

    seed: int = 0
    laziness: float = 0.0
    unfit: float = 0.0


IMMEDIATE = Delays()


class PagePools(Protocol):
    """Owner of the copied pages: one u64 array per layer, page after page."""

    pools: list[np.ndarray]
    page_size: int
    num_pages: int


class _InFlight:
    """A copy in flight."""

    __slots__ = ("copy", "data", "delay", "is_swap_in")

    def __init__(self, copy: ChunkCopy, *, is_swap_in: bool, delay: int, data: np.ndarray | None) -> None:
        self.copy = copy
        self.is_swap_in = is_swap_in
        self.delay = delay
        self.data = data  # u64[num_layers, page_size], once its source was read


class FakeTransfers:
    """A `Transfers` over the pages of `pages` and its own `num_slots` slots.

    Attributes:
        host: u64[num_slots + 1, num_layers, page_size]; slot 0 belongs to no copy.
    """

    def __init__(
        self, pages: PagePools, num_slots: int, num_layers: int, max_num_staged: int, delays: Delays
    ) -> None:
        self._pages = pages
        self._max_num_staged = max_num_staged
        self._num_slots = num_slots
        self._random = random.Random(delays.seed)
        self._laziness = delays.laziness
        self._unfit = delays.unfit
        self.host = np.full((num_slots + 1, num_layers, pages.page_size), POISON_64)
        self._good_slots: set[int] = set()
        self._in_flight: dict[int, _InFlight] = {}
        self._slots: dict[int, int] = {}  # slot -> the copy in flight that it belongs to
        self._targets: dict[int, int] = {}  # page -> the swap-in in flight that it belongs to
        self._expedited: list[_InFlight] = []  # for the step that is dispatched next
        self._used_ids: set[int] = set()
        self._num_copies = {True: 0, False: 0}

    # Called by the engine.

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            self._check_new(copy)
            assert copy.page not in self._targets, f"{copy} reads a page that is being written"
            data = np.stack([pool[self._span(copy.page)] for pool in self._pages.pools])
            self._good_slots.discard(copy.slot)
            self.host[copy.slot] = POISON_64
            self._start(copy, is_swap_in=False, data=data)

    def swap_in(self, copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            self._check_new(copy)
            assert copy.slot in self._good_slots, f"{copy} reads a slot that holds nothing"
            assert copy.page not in self._targets, (
                f"{copy} writes the page of copy {self._targets[copy.page]}"
            )
            self._targets[copy.page] = copy.copy_id
            self._write(copy.page, POISON_64)
            self._start(copy, is_swap_in=True, data=None)

    def expedite(self, copy_ids: Collection[int]) -> None:
        num_in = sum(found.is_swap_in for found in self._in_flight.values())
        assert not copy_ids or num_in <= self._max_num_staged, f"{num_in} swap-ins are more than fit"
        for copy_id in copy_ids:
            found = self._in_flight.get(copy_id)
            assert found is not None, f"copy {copy_id} is expedited, and not in flight"
            assert found.is_swap_in, f"copy {copy_id} is expedited, and not a swap-in"
            self._read_slot(found)
            self._leave(found)
            self._expedited.append(found)

    def completed(self) -> Ended:
        assert not self._expedited, "a copy was expedited for a step that was not dispatched"
        for found in self._in_flight.values():
            if found.is_swap_in and self._random.random() < 0.3:
                self._read_slot(found)
        done = [found for found in self._in_flight.values() if self._is_done(found)]
        if self._laziness:
            self._random.shuffle(done)
        lost = [found for found in done if self._is_lost(found)]
        arrived = [found for found in done if not self._is_lost(found)]
        for found in lost:
            self._leave(found)
        for found in arrived:
            self._complete(found)
        return Ended(*([found.copy.copy_id for found in some] for some in (arrived, lost)))

    def wait(self) -> None:
        waiting = list(self._in_flight.values())
        assert waiting, "nothing in flight to wait for"
        for found in self._random.sample(waiting, self._random.randint(1, len(waiting))):
            found.delay = 0

    def reset(self) -> None:
        self._in_flight.clear()
        self._slots.clear()
        self._targets.clear()
        self._expedited.clear()
        self._used_ids.clear()

    def stats(self) -> dict[str, int | float]:
        num_bytes = self.host[0].nbytes
        return {
            "swapped_out_bytes": self._num_copies[False] * num_bytes,
            "swapped_in_bytes": self._num_copies[True] * num_bytes,
            "num_swap_out_copies": self._num_copies[False],
            "num_swap_in_copies": self._num_copies[True],
            "swap_dispatch_s": 0.0,
            "transfer_stall_s": 0.0,
        }

    # Called by the runner.

    def before_step(self, pages: Collection[int]) -> None:
        """Apply expedited copies before a step that reads or writes these pages is dispatched."""
        for found in self._expedited:
            self._write(found.copy.page, found.data)
        self._expedited.clear()
        if self._targets:
            used = self._targets.keys() & pages
            assert not used, f"a step uses pages {sorted(used)}, which are being copied to"

    # Internals.

    def _check_new(self, copy: ChunkCopy) -> None:
        assert copy.copy_id not in self._used_ids, f"copy id {copy.copy_id} is used twice"
        assert 1 <= copy.page < self._pages.num_pages, f"{copy}: no such page"
        assert 1 <= copy.slot <= self._num_slots, f"{copy}: no such slot"
        assert copy.slot not in self._slots, f"{copy} uses the slot of copy {self._slots[copy.slot]}"
        assert not any(found.copy.page == copy.page for found in self._expedited)

    def _start(self, copy: ChunkCopy, *, is_swap_in: bool, data: np.ndarray | None) -> None:
        self._used_ids.add(copy.copy_id)
        self._slots[copy.slot] = copy.copy_id
        found = _InFlight(copy, is_swap_in=is_swap_in, delay=self._draw_delay(), data=data)
        self._in_flight[copy.copy_id] = found
        self._num_copies[is_swap_in] += 1

    def _draw_delay(self) -> int:
        if not self._laziness:
            return 0
        delay = 0
        while delay < MAX_DELAY and self._random.random() < self._laziness:
            delay += 1
        return delay * 10 if self._random.random() < 0.02 else delay

    def _is_done(self, found: _InFlight) -> bool:
        found.delay -= 1
        return found.delay < 0

    def _is_lost(self, found: _InFlight) -> bool:
        """Decide by the first token's entry alone, so that appending to a chunk does not make it fit."""
        if found.is_swap_in or not self._unfit:
            return False
        return int(found.data[0, 0]) % 1000 < 1000 * self._unfit

    def _complete(self, found: _InFlight) -> None:
        copy = found.copy
        if found.is_swap_in:
            self._read_slot(found)
            self._write(copy.page, found.data)
        else:
            self.host[copy.slot] = found.data
            self._good_slots.add(copy.slot)
        self._leave(found)

    def _leave(self, found: _InFlight) -> None:
        del self._in_flight[found.copy.copy_id]
        del self._slots[found.copy.slot]
        if found.is_swap_in:
            del self._targets[found.copy.page]

    def _read_slot(self, found: _InFlight) -> None:
        if found.data is None:
            found.data = self.host[found.copy.slot].copy()

    def _write(self, page: int, data: np.ndarray | np.uint64) -> None:
        rows = data if isinstance(data, np.ndarray) else [data] * len(self._pages.pools)
        for pool, row in zip(self._pages.pools, rows, strict=True):
            pool[self._span(page)] = row

    def _span(self, page: int) -> slice:
        return slice(page * self._pages.page_size, (page + 1) * self._pages.page_size)
