"""Eviction on demand, and swap-out ahead of demand.

Owns: the order of victims: idle sequences in the policy's order, then queued sequences, the latest arrival
first. Within each, pages with a host copy go before pages that must be copied or dropped.
Does not know: what the room is for.
Called by `CacheManager`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.drops import DropReason
from pensieve_jax.cache.order.policies import EvictionPolicy
from pensieve_jax.cache.order.victims import Victim, VictimOrder
from pensieve_jax.cache.sequence import CachedSequence, Role
from pensieve_jax.cache.states import ChunkState, EvictionClass
from pensieve_jax.core.clock import Clock

_BY_PRICE = (
    EvictionClass.CLEAN,
    EvictionClass.DIRTY,
)  # classes with pages: first those that are free to take, then those that need a copy or a drop
_MAX_AHEAD = 16  # pages copied beyond the threshold at once, so that victims are not ordered in every step
# Copies begun ahead of need in one step. Each takes the host 0.1 ms. A decode step of 13 ms leaves the host
# 5 to 8 ms (a 13B model on an H200), so with 100 copies the device would wait for the next step.
_MAX_A_STEP = 16


class Evictor:
    """The eviction of one cache: it frees and allocates pages and slots.

    Attributes:
      num_forced_swap_outs: chunks whose page was needed before they had been copied out.
    """

    def __init__(
        self,
        store: ChunkStore,
        policy: EvictionPolicy,
        clock: Clock,
        *,
        num_clean_pages: int,
        max_num_copies: int,
        retrieval_priority: bool,
    ) -> None:
        """Keep `num_clean_pages` free or copied, with at most `max_num_copies` copies out in flight."""
        self._store = store
        self._policy = policy
        self._clock = clock
        self._num_clean_pages = num_clean_pages
        self._num_ahead = max(1, min(_MAX_AHEAD, num_clean_pages // 4))
        self._max_num_copies = max_num_copies
        self._retrieval_priority = retrieval_priority
        classes = (*_BY_PRICE, EvictionClass.HOST)
        self._orders = {
            eviction_class: VictimOrder(policy, eviction_class, store.changed[eviction_class])
            for eviction_class in classes
        }
        self._num_idle_by_class = store.num_by_class[Role.IDLE]
        self._now_s: float | None = None  # the time of the pass, read at its first use
        self._begun: set[EvictionClass] = set()  # classes whose orders were used in this pass
        self._lenders: Iterator[tuple[CachedSequence, int]] = self._chunks_on_both()
        self.num_forced_swap_outs = 0

    def begin_pass(self) -> None:
        """Forget the time and the lending chunks of the last pass."""
        self._now_s = None
        self._begun.clear()
        self._lenders = self._chunks_on_both()

    def allocate_page(self, arrival: int) -> int | None:
        """Allocate a page for a request; None if nothing may be evicted for it."""
        if not self._store.pages.num_free and not self._free_page(arrival):
            return None
        return self._store.pages.allocate()

    def allocate_spare_page(self) -> int | None:
        """Allocate a page that is free or of an idle chunk with a host copy; returns None without one."""
        if not self._store.pages.num_free:
            victim = self._victim(EvictionClass.CLEAN)
            if victim is None:
                return None
            self._free_pages(*victim)
        return self._store.pages.allocate()

    def swap_out_ahead(self) -> None:
        """Copy out idle chunks, lowest retention value first, while too few pages are free or copied (4.3.2).

        The pages stay valid until another request needs them, so a conversation that returns before that
        loses nothing. A chunk that does not fit host memory is dropped. With `retrieval_priority`, no copy
        begins while a chunk is being copied in. Only a limited number of copies begins per call, unless more
        than half of the wanted clean pages are missing.
        """
        store = self._store
        if not store.slots.num_places or (self._retrieval_priority and store.num_copies_in):
            return
        num_clean = store.pages.num_free + sum(
            store.num_by_class[role][EvictionClass.CLEAN] for role in (Role.IDLE, Role.QUEUED)
        )
        if num_clean >= self._num_clean_pages:
            return
        num_missing = self._num_clean_pages + self._num_ahead - num_clean
        num_at_once = max(_MAX_A_STEP, num_missing - self._num_clean_pages // 2)
        for _ in range(min(num_missing, num_at_once, self._max_num_copies - store.num_copies_out)):
            victim = self._victim(EvictionClass.DIRTY)
            if victim is None:
                return
            sequence, indices, worth = victim
            if not sequence.chunks[indices[0]].fits_host:
                self._drop_unfit(sequence, indices[0], worth)
                continue
            slot = self._allocate_slot(worth, sequence)
            if slot is None:
                return  # host memory holds only chunks of higher value: this one is dropped on demand
            store.swap_out(sequence, indices[0], slot)

    def push_out(self, sequence: CachedSequence, max_num_chunks: int) -> int:
        """Evict pages of an idle sequence, leading chunks first, as if they were needed; returns how many.

        Their chunks displace any idle chunk in host memory, but none of a queued request.
        """
        indices = sorted(sequence.indices_of(EvictionClass.CLEAN) + sequence.indices_of(EvictionClass.DIRTY))[
            :max_num_chunks
        ]
        self._free_pages(sequence, indices, math.inf)
        return len(indices)

    # Pages

    def _free_page(self, arrival: int) -> bool:
        """Free the pages of one victim group: idle chunks first, then those of later arrivals."""
        for eviction_class in _BY_PRICE:
            victim = self._victim(eviction_class)
            if victim is not None:
                self._free_pages(*victim)
                return True
        for sequence in self._latest_queued(arrival):
            for eviction_class in _BY_PRICE:
                if sequence.num_by_class[eviction_class]:
                    self._free_pages(sequence, self._frontier(sequence, eviction_class), math.inf)
                    return True
        return False

    def _free_pages(self, sequence: CachedSequence, indices: Sequence[int], worth: float) -> None:
        """Free the pages of chunks of value `worth`; chunks without a copy begin one or are dropped."""
        for index in indices:
            if sequence.chunks[index].eviction_class is EvictionClass.CLEAN:
                self._store.give_page(sequence, index)
            else:
                self._push_out(sequence, index, worth)
        self._store.trim(sequence)

    def _push_out(self, sequence: CachedSequence, index: int, worth: float) -> None:
        """Free the page of a chunk without a copy: begin the copy now, or drop the chunk."""
        if self._store.slots.num_places and not sequence.chunks[index].fits_host:
            self._store.drop(sequence, index, DropReason.FITS_NO_SLOT, worth)
            return
        slot = self._allocate_slot(worth, sequence)
        if slot is None:
            self._store.drop(sequence, index, self._why_no_slot(), worth)
            return
        self._store.swap_out(sequence, index, slot)
        self._store.give_page(sequence, index)
        self.num_forced_swap_outs += 1

    def _drop_unfit(self, sequence: CachedSequence, index: int, worth: float) -> None:
        """Drop a chunk that was chosen for swap-out but does not fit host memory."""
        self._store.drop(sequence, index, DropReason.FITS_NO_SLOT, worth)
        self._store.trim(sequence)

    # Slots

    def _why_no_slot(self) -> DropReason:
        """Return why `_allocate_slot` just returned None."""
        if not self._store.slots.num_places:
            return DropReason.NO_HOST_MEMORY
        has_victim = self._victim(EvictionClass.HOST) is not None
        return DropReason.HOST_MEMORY_WORTH_MORE if has_victim else DropReason.NO_SLOT

    def _allocate_slot(self, worth: float, sequence: CachedSequence) -> int | None:
        """Allocate a slot for a chunk of `sequence`; None if every candidate there is worth more.

        A queued request's chunk is worth more than any idle chunk and than chunks of later arrivals.
        """
        slots = self._store.slots
        if not slots.num_places:
            return None
        if slots.num_free or self._borrow_slot() or self._drop_idle(worth):
            return slots.allocate()
        if sequence.role is Role.QUEUED and self._drop_queued(sequence):
            return slots.allocate()
        return None

    def _borrow_slot(self) -> bool:
        """Free the slot of a running or queued chunk that also has a page."""
        for sequence, index in self._lenders:
            self._store.give_slot(sequence, index)
            return True
        return False

    def _chunks_on_both(self) -> Iterator[tuple[CachedSequence, int]]:
        """Yield chunks in state ON_BOTH of running, then of queued sequences; each is visited once."""
        for role in (Role.RUNNING, Role.QUEUED):
            if not self._store.num_by_class[role][EvictionClass.CLEAN]:
                continue
            for sequence in tuple(self._store.members[role]):
                for index in (
                    sequence.indices_of(EvictionClass.CLEAN)
                    if sequence.num_by_class[EvictionClass.CLEAN]
                    else ()
                ):
                    if sequence.role is not role or index >= len(sequence.chunks):
                        break  # it was suspended or truncated since
                    if sequence.chunks[index].state is ChunkState.ON_BOTH:
                        yield sequence, index

    def _drop_idle(self, worth: float) -> bool:
        """Drop the idle chunks of lowest value in host memory, unless that value is above `worth`."""
        victim = self._victim(EvictionClass.HOST)
        if victim is None or victim.worth > worth:
            return False
        sequence, indices, its_worth = victim
        for index in indices:
            self._store.drop(sequence, index, DropReason.SLOT_NEEDED, its_worth)
        self._store.trim(sequence)
        return True

    def _drop_queued(self, keep: CachedSequence) -> bool:
        for sequence in self._latest_queued(keep.arrival):
            if sequence.num_by_class[EvictionClass.HOST]:
                for index in self._frontier(sequence, EvictionClass.HOST):
                    self._store.drop(sequence, index, DropReason.EARLIER_REQUEST, math.inf)
                self._store.trim(sequence)
                return True
        return False

    # Order

    def _victim(self, eviction_class: EvictionClass) -> Victim[CachedSequence] | None:
        """Return the next idle victim of an eviction class, or None."""
        if not self._num_idle_by_class[eviction_class]:
            return None
        order = self._orders[eviction_class]
        if eviction_class not in self._begun:
            self._begun.add(eviction_class)
            if self._now_s is None:
                self._now_s = self._clock.now()
            order.begin(self._now_s)
        return order.peek()

    def _frontier(self, sequence: CachedSequence, eviction_class: EvictionClass) -> Sequence[int]:
        """Return the chunks that a queued sequence with chunks of this class gives up first."""
        return self._policy.frontier(sequence, eviction_class, self._policy.chunk(sequence, eviction_class))

    def _latest_queued(self, arrival: int) -> Iterator[CachedSequence]:
        """Return the queued sequences that arrived after `arrival`, the latest first."""
        queued = sorted(self._store.members[Role.QUEUED], key=lambda s: -s.arrival)
        return (sequence for sequence in queued if sequence.arrival > arrival)
