"""Bugs to plant around two tiers: errors in the cache, and faults of the transfers. See `mutations`."""

from __future__ import annotations

import numpy as np

from pensieve_jax.cache import CachedSequence, CacheManager, ChunkEvent, ChunkState
from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.trunks import SharedChunks
from pensieve_jax.engine.transfers import Ended
from pensieve_jax.scheduler import Request, Scheduler
from tests.engine.fake_runner import FakeRunner
from tests.engine.fake_transfers import FakeTransfers
from tests.engine.mutations import Mutation, by_name
from tests.engine.observed import ObservedTransfers

# Errors with two tiers


def stale_copy_of_a_tail_kept(patch):
    """Leave a chunk's copy in host memory unchanged when the chunk is appended to."""

    def write(self, sequence, index):
        if sequence.chunks[index].state is ChunkState.RESERVED:
            self._apply(sequence, index, ChunkEvent.FILL)

    patch.setattr(ChunkStore, "write", write)


def _after_detaching(patch, let_go):
    detached = ChunkStore._detach

    def orphaned(self, chunk, *, is_in):
        copy_id = chunk.copy_id
        detached(self, chunk, is_in=is_in)
        self._detached_copies[copy_id] = let_go(self, self._detached_copies[copy_id])

    patch.setattr(ChunkStore, "_detach", orphaned)


def slot_freed_while_in_flight(patch):
    def let_go(store, detached):
        if detached.slot:
            store.slots.free(detached.slot)
        return detached._replace(slot=0)

    _after_detaching(patch, let_go)


def page_freed_while_in_flight(patch):
    def let_go(store, detached):
        if detached.page:
            store.pages.free(detached.page)
        return detached._replace(page=0)

    _after_detaching(patch, let_go)


def orphan_forgotten(patch):
    patch.setattr(ChunkStore, "_free_detached", lambda self, detached: None)


def arriving_chunks_are_read(patch):
    patch.setattr(CachedSequence, "first_arriving", property(lambda self: None))


def expediting_is_not_passed_on(patch):
    patch.setattr(ObservedTransfers, "expedite", lambda self, copy_ids: None)


def copies_out_are_left_out(patch):
    """Skip one copy out in five, and report it as done."""
    swap_out, completed = ObservedTransfers.swap_out, ObservedTransfers.completed

    def swapped_out(self, copies):
        left_out = [copy.copy_id for copy in copies if copy.copy_id % 5 == 0]
        self.__dict__.setdefault("left_out", []).extend(left_out)
        swap_out(self, [copy for copy in copies if copy.copy_id % 5])

    def named(self):
        arrived, lost = completed(self)
        return Ended([*arrived, *self.__dict__.pop("left_out", ())], lost)

    patch.setattr(ObservedTransfers, "swap_out", swapped_out)
    patch.setattr(ObservedTransfers, "completed", named)


def lost_copies_still_count(patch):
    """After a failed step, treat a chunk that was being copied out as arrived."""
    lose_page = ChunkStore._lose_page

    def lost(self, sequence, index):
        if sequence.chunks[index].state is ChunkState.LEAVING:
            self._apply(sequence, index, ChunkEvent.ARRIVE)
        else:
            lose_page(self, sequence, index)

    patch.setattr(ChunkStore, "_lose_page", lost)


def chunks_on_their_way_out_are_admitted(patch):
    """Do not wait for them at admission, and recompute them instead of copying."""
    patch.setattr(CacheManager, "is_departing", lambda self, sequence: False)


def slots_of_expedited_copies_are_given_away(patch):
    """Give them away in the same pass, whose copies out run before its copies in."""
    expedite = Scheduler._expedite

    def expedited(self):
        copy_ids, step = expedite(self)
        if copy_ids:
            self._cache.end_step()
        return copy_ids, step

    patch.setattr(Scheduler, "_expedite", expedited)


def lost_copies_count_as_arrived(patch):
    """Do not report that a list was too short."""
    completed = ObservedTransfers.completed

    def named(self):
        arrived, lost = completed(self)
        return Ended([*arrived, *lost])

    patch.setattr(ObservedTransfers, "completed", named)


def slots_of_lost_copies_leak(patch):
    lose = ChunkStore.lose

    def lost(self, copy_ids):
        for sequence, index in [self._flights[i] for i in copy_ids if i in self._flights]:
            sequence.chunks[index].slot = 0
        lose(self, copy_ids)

    patch.setattr(ChunkStore, "lose", lost)


def what_a_lost_copy_was_to_save_counts_as_kept(patch):
    """Treat a chunk that gave its page to the copy as present at the copy's target."""
    lose, complete = ChunkStore.lose, ChunkStore.complete

    def lost(self, copy_ids):
        for copy_id in copy_ids:
            sequence, index = self._flights.get(copy_id, (None, 0))
            leaves = sequence is not None and sequence.chunks[index].state is ChunkState.LEAVING
            (complete if leaves else lose)(self, [copy_id])

    patch.setattr(ChunkStore, "lose", lost)


def copied_in_counts_as_reused(patch):
    on_admitted = Request.on_admitted

    def admitted(self, chunk_tokens):
        on_admitted(self, chunk_tokens)
        self._reused_tokens += self._swapped_in_tokens
        self._swapped_in_tokens = 0

    patch.setattr(Request, "on_admitted", admitted)


def a_prefix_in_use_is_evicted(patch):
    patch.setattr(SharedChunks, "pin", lambda self, sequence: None)
    patch.setattr(SharedChunks, "_unpin_from", lambda self, trunk: None)


def holes_in_a_prefix_are_left_to_others(patch):
    def skip_filled(self, chunk_tokens):
        while self.holes and self.holes[0][1] <= self.sequence.num_shared * chunk_tokens:
            self.holes.pop(0)

    patch.setattr(Request, "skip_filled", skip_filled)


# Faults of the transfers between tiers: the five of the two-tier cache's issue


def a_byte_of_the_cpu_tier_is_flipped(patch):
    complete = FakeTransfers._complete

    def completed(self, found):
        complete(self, found)
        if not found.is_swap_in and found.copy.copy_id % 5 == 0:
            self.host[found.copy.slot, -1, 7] ^= np.uint64(1 << 16)

    patch.setattr(FakeTransfers, "_complete", completed)


def a_copy_goes_into_the_wrong_page(patch):
    """Occasionally write the next page, which may belong to another sequence."""
    complete = FakeTransfers._complete

    def completed(self, found):
        page = found.copy.page
        if found.is_swap_in and found.copy.copy_id % 3 == 0:
            self._read_slot(found)
            self._write(page % (self._pages.num_pages - 1) + 1, found.data)
            self._leave(found)
        else:
            complete(self, found)

    patch.setattr(FakeTransfers, "_complete", completed)


def a_copy_is_read_before_it_is_ready(patch):
    """Let `completed` name swap-ins at the first call, even if they are still in flight."""
    completed = FakeTransfers.completed

    def named(self):
        named_early = self.__dict__.setdefault("named_early", set())
        early = [found for found in self._in_flight.values() if found.is_swap_in]
        early = [found.copy.copy_id for found in early if found.copy.copy_id not in named_early]
        arrived, lost = completed(self)
        copy_ids = [copy_id for copy_id in arrived if copy_id not in named_early]
        named_early.update(early)
        return Ended(copy_ids + [copy_id for copy_id in early if copy_id not in copy_ids], lost)

    patch.setattr(FakeTransfers, "completed", named)


def a_copy_is_lost(patch):
    """Complete every seventh copy without copying."""
    complete = FakeTransfers._complete

    def completed(self, found):
        if found.copy.copy_id % 7:
            complete(self, found)
            return
        self._leave(found)
        if not found.is_swap_in:
            self._good_slots.add(found.copy.slot)

    patch.setattr(FakeTransfers, "_complete", completed)


def a_page_is_reused_before_it_was_read(patch):
    """Read a swap-out's page when it completes, not when it starts."""
    complete = FakeTransfers._complete

    def completed(self, found):
        if not found.is_swap_in:
            found.data = np.stack([pool[self._span(found.copy.page)] for pool in self._pages.pools])
        complete(self, found)

    patch.setattr(FakeTransfers, "_complete", completed)


def an_expedited_copy_comes_after_its_step(patch):
    before_step, launch = FakeTransfers.before_step, FakeRunner.launch

    def launched(self, plan):
        expedited, self.transfers._expedited = self.transfers._expedited, []
        handle = launch(self, plan)
        self.transfers._expedited = expedited
        before_step(self.transfers, set())
        return handle

    patch.setattr(FakeRunner, "launch", launched)


TIER_MUTATIONS: dict[str, Mutation] = by_name(
    stale_copy_of_a_tail_kept,
    slot_freed_while_in_flight,
    page_freed_while_in_flight,
    orphan_forgotten,
    arriving_chunks_are_read,
    expediting_is_not_passed_on,
    copies_out_are_left_out,
    lost_copies_still_count,
    chunks_on_their_way_out_are_admitted,
    slots_of_expedited_copies_are_given_away,
    lost_copies_count_as_arrived,
    slots_of_lost_copies_leak,
    what_a_lost_copy_was_to_save_counts_as_kept,
    copied_in_counts_as_reused,
    a_prefix_in_use_is_evicted,
    holes_in_a_prefix_are_left_to_others,
    a_byte_of_the_cpu_tier_is_flipped,
    a_copy_goes_into_the_wrong_page,
    a_copy_is_read_before_it_is_ready,
    a_copy_is_lost,
    a_page_is_reused_before_it_was_read,
    an_expedited_copy_comes_after_its_step,
)
