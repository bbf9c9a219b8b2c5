"""Who gives way when a page or a slot is needed, and what is copied out before anybody needs room.

Owns: the order among idle sequences (the policy's), then queued ones (the latest arrival first), and which
kind of place goes first: pages with a copy, then pages that must be copied or dropped.
Does not know: what the room is for.
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
)  # shelves with pages to take: for nothing, then for a copy or a loss
_MAX_AHEAD = 16  # pages copied beyond the threshold at a time, so that idle chunks are not ordered every step
# Copies begun ahead of need in one step. Each takes the host a tenth of a millisecond, of the 5 to 8 that a
# decode step of 13 leaves it (a 13B model on an H200): with a hundred the device waits for the next step.
_MAX_A_STEP = 16


class Evictor:
    """Finds pages and slots.

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
        """`num_clean_pages` are kept free or copied, by at most `max_num_copies` copies in flight."""
        self._store = store
        self._policy = policy
        self._clock = clock
        self._num_clean_pages = num_clean_pages
        self._num_ahead = max(1, min(_MAX_AHEAD, num_clean_pages // 4))
        self._max_num_copies = max_num_copies
        self._retrieval_priority = retrieval_priority
        shelves = (*_BY_PRICE, EvictionClass.HOST)
        self._orders = {shelf: VictimOrder(policy, shelf, store.changed[shelf]) for shelf in shelves}
        self._num_idle_on = store.num_on[Role.IDLE]
        self._now_s: float | None = None  # the time of the pass, once somebody has asked
        self._begun: set[EvictionClass] = set()  # whose orders were asked in this pass
        self._lenders: Iterator[tuple[CachedSequence, int]] = self._chunks_on_both()
        self.num_forced_swap_outs = 0

    def begin_pass(self) -> None:
        """Forget what was true of the pass before."""
        self._now_s = None
        self._begun.clear()
        self._lenders = self._chunks_on_both()

    def allocate_page(self, arrival: int) -> int | None:
        """A page for a request; None where nobody gives way to it."""
        if not self._store.pages.num_free and not self._free_page(arrival):
            return None
        return self._store.pages.allocate()

    def allocate_spare_page(self) -> int | None:
        """A page that costs nobody anything: free, or of an idle chunk that has a copy."""
        if not self._store.pages.num_free:
            victim = self._victim(EvictionClass.CLEAN)
            if victim is None:
                return None
            self._free_pages(*victim)
        return self._store.pages.allocate()

    def swap_out_ahead(self) -> None:
        """Copy out the idle chunks of the lowest worth while too few pages are free or copied (4.3.2).

        Their pages stay valid, and go to whoever needs them later; a conversation that comes back before
        that has lost nothing. What host memory cannot keep is dropped when its turn comes. Retrieval comes
        first: nothing begins while a chunk is being copied in. Unless more than half of those pages is
        missing, few are copied at a time.
        """
        store = self._store
        if not store.slots.num_places or (self._retrieval_priority and store.num_copies_in):
            return
        num_clean = store.pages.num_free + sum(
            store.num_on[role][EvictionClass.CLEAN] for role in (Role.IDLE, Role.QUEUED)
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
                return  # everything in host memory is worth more: this chunk is dropped when its turn comes
            store.swap_out(sequence, indices[0], slot)

    def push_out(self, sequence: CachedSequence, max_num_chunks: int) -> int:
        """Take pages of an idle sequence, leading first, as if they were needed; returns how many.

        What they hold displaces anything idle in host memory, and nothing of a queued request.
        """
        indices = sorted(sequence.indices_on(EvictionClass.CLEAN) + sequence.indices_on(EvictionClass.DIRTY))[
            :max_num_chunks
        ]
        self._free_pages(sequence, indices, math.inf)
        return len(indices)

    # Pages

    def _free_page(self, arrival: int) -> bool:
        """Free the pages of one victim group, idle chunks before those of later arrivals."""
        for shelf in _BY_PRICE:
            victim = self._victim(shelf)
            if victim is not None:
                self._free_pages(*victim)
                return True
        for sequence in self._latest_queued(arrival):
            for shelf in _BY_PRICE:
                if sequence.num_on[shelf]:
                    self._free_pages(sequence, self._frontier(sequence, shelf), math.inf)
                    return True
        return False

    def _free_pages(self, sequence: CachedSequence, indices: Sequence[int], worth: float) -> None:
        """Free the pages of chunks that are worth `worth`; those without a copy begin one, or are dropped."""
        for index in indices:
            if sequence.chunks[index].shelf is EvictionClass.CLEAN:
                self._store.give_page(sequence, index)
            else:
                self._push_out(sequence, index, worth)
        self._store.trim(sequence)

    def _push_out(self, sequence: CachedSequence, index: int, worth: float) -> None:
        """Take the page of a chunk that has no copy: the copy begins now, or the chunk is dropped."""
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
        """A chunk whose turn to be copied has come has no form for that."""
        self._store.drop(sequence, index, DropReason.FITS_NO_SLOT, worth)
        self._store.trim(sequence)

    # Slots

    def _why_no_slot(self) -> DropReason:
        """What kept `_allocate_slot` from finding one just now."""
        if not self._store.slots.num_places:
            return DropReason.NO_HOST_MEMORY
        has_victim = self._victim(EvictionClass.HOST) is not None
        return DropReason.HOST_MEMORY_WORTH_MORE if has_victim else DropReason.NO_SLOT

    def _allocate_slot(self, worth: float, sequence: CachedSequence) -> int | None:
        """A slot for a chunk of `sequence`; None where everything there is worth more.

        A queued request's is worth more than anything idle, and than what later arrivals have.
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
        """Free the slot of a chunk that is on the gpu as well and does not give way before others."""
        for sequence, index in self._lenders:
            self._store.give_slot(sequence, index)
            return True
        return False

    def _chunks_on_both(self) -> Iterator[tuple[CachedSequence, int]]:
        """Chunks of running, then of queued sequences that are on the gpu as well, one look at each."""
        for role in (Role.RUNNING, Role.QUEUED):
            if not self._store.num_on[role][EvictionClass.CLEAN]:
                continue
            for sequence in tuple(self._store.members[role]):
                for index in (
                    sequence.indices_on(EvictionClass.CLEAN) if sequence.num_on[EvictionClass.CLEAN] else ()
                ):
                    if sequence.role is not role or index >= len(sequence.chunks):
                        break  # it was suspended or cut since
                    if sequence.chunks[index].state is ChunkState.ON_BOTH:
                        yield sequence, index

    def _drop_idle(self, worth: float) -> bool:
        """Drop what is worth least in host memory, if it is not worth more than what wants its slot."""
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
            if sequence.num_on[EvictionClass.HOST]:
                for index in self._frontier(sequence, EvictionClass.HOST):
                    self._store.drop(sequence, index, DropReason.EARLIER_REQUEST, math.inf)
                self._store.trim(sequence)
                return True
        return False

    # Order

    def _victim(self, shelf: EvictionClass) -> Victim | None:
        """The next idle victim on a shelf."""
        if not self._num_idle_on[shelf]:
            return None
        order = self._orders[shelf]
        if shelf not in self._begun:
            self._begun.add(shelf)
            if self._now_s is None:
                self._now_s = self._clock.now()
            order.begin(self._now_s)
        return order.peek()

    def _frontier(self, sequence: CachedSequence, shelf: EvictionClass) -> Sequence[int]:
        """What a sequence gives up first that is not idle, and has something on the shelf."""
        return self._policy.frontier(sequence, shelf, self._policy.chunk(sequence, shelf))

    def _latest_queued(self, arrival: int) -> Iterator[CachedSequence]:
        """Queued sequences that arrived after `arrival`, the latest first."""
        queued = sorted(self._store.members[Role.QUEUED], key=lambda s: -s.arrival)
        return (sequence for sequence in queued if sequence.arrival > arrival)
