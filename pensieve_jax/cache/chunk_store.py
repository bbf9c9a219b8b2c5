"""The operations on single chunks in both tiers, and the counts that follow from them.

Owns: the pages and slots, the sequences by role, the number of chunks by role and eviction class, and the
copies in flight. A copy whose chunk was dropped or freed meanwhile is detached (`detached_copies`); it keeps
its places until it completes.
Does not know: why an operation happens; the evictor chooses victims, and the manager admits requests.
Called by `CacheManager`, `Evictor` and `SharedChunks`. They name a chunk by its owner and its index there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from pensieve_jax.cache.drops import ChunkCopy, ChunkDrop, DetachedCopy, DropReason
from pensieve_jax.cache.page_table import PageTable
from pensieve_jax.cache.sequence import NUM_EVICTION_CLASSES, CachedSequence, Chunk, Role
from pensieve_jax.cache.states import CONTESTED, ChunkEvent, ChunkState, EvictionClass, next_state
from pensieve_jax.cache.tiers import TierPool


class ChunkStore:
    """All chunks of one cache.

    Attributes:
      pages: pages of device memory.
      slots: slots of host memory.
      page_table: the pages of running sequences, by their `row`, as steps read them.
      members: sequences by role, in the order in which they took it, which makes ties reproducible.
      num_by_class: number of own chunks by role of the sequence and eviction class.
      changed: for each evictable class, the sequences whose place in the eviction order must be updated: they
        became idle, or while idle were active or got a chunk of the class. `VictimOrder` removes them.
      num_copies_in, num_copies_out: copies in flight, detached ones included.
      num_lost_copies: copies to slots that hold no KV afterwards; see `lose`.
    """

    def __init__(
        self, num_pages: int, num_slots: int, chunk_tokens: int, on_drop: Callable[[ChunkDrop], None]
    ) -> None:
        """Start with all pages and slots free; `on_drop` is called immediately for every drop."""
        self._on_drop = on_drop
        self.pages = TierPool(num_pages)
        self.slots = TierPool(num_slots)
        self.page_table = PageTable()
        self.members: dict[Role, dict[CachedSequence, None]] = {role: {} for role in Role}
        self.num_by_class: dict[Role, list[int]] = {role: [0] * NUM_EVICTION_CLASSES for role in Role}
        self.num_copies_in = 0
        self.num_copies_out = 0
        self.num_lost_copies = 0
        self._chunk_tokens = chunk_tokens
        self._flights: dict[int, tuple[CachedSequence, int]] = {}
        self._detached_copies: dict[int, DetachedCopy] = {}
        self._num_copies = 0
        self._swap_outs: list[ChunkCopy] = []
        self._swap_ins: list[ChunkCopy] = []
        self._drops: list[ChunkDrop] = []
        self._num_roles = 0
        self.changed: dict[EvictionClass, dict[CachedSequence, None]] = {
            eviction_class: {} for eviction_class in CONTESTED
        }

    # Sequences

    def num_resident(self, role: Role) -> int:
        """Return the number of chunks of a role's sequences that steps can read."""
        num_by_class = self.num_by_class[role]
        return num_by_class[EvictionClass.DIRTY] + num_by_class[EvictionClass.CLEAN]

    def __iter__(self) -> Iterator[CachedSequence]:
        for members in self.members.values():
            yield from members

    def add(self, sequence: CachedSequence) -> None:
        """Add a new sequence without chunks."""
        self._enter(sequence, sequence.role)

    def remove(self, sequence: CachedSequence) -> None:
        """Forget a sequence that has no chunks of its own left."""
        self._leave_role(sequence)
        for changed in self.changed.values():  # some are never consumed, as HOST without host memory
            changed.pop(sequence, None)

    def set_role(self, sequence: CachedSequence, role: Role) -> None:
        """Move a sequence and its counts to the end of a role's members."""
        self._leave_role(sequence)
        before, after = self.num_by_class[sequence.role], self.num_by_class[role]
        for eviction_class, number in enumerate(sequence.num_by_class):
            before[eviction_class] -= number
            after[eviction_class] += number
        self._enter(sequence, role)

    def set_active(self, sequence: CachedSequence, at_s: float) -> None:
        """Record when a sequence was last active."""
        sequence.last_active_s = at_s
        if sequence.role is Role.IDLE:
            self._note_changed(sequence)

    def set_bucket(self, sequence: CachedSequence, bucket: int) -> None:
        """Set the bucket of a sequence's latest turn, possibly after the sequence became idle."""
        sequence.bucket = bucket
        if sequence.role is Role.IDLE:
            self._note_changed(sequence)

    def extend(self, sequence: CachedSequence, num_chunks: int) -> None:
        """Append dropped chunks to a sequence until it has `num_chunks`."""
        first = len(sequence.chunks)
        if num_chunks > first:
            sequence.chunks += [Chunk() for _ in range(first, num_chunks)]
            self._count_absent(sequence, first, num_chunks - first)

    def shorten(self, sequence: CachedSequence, num_chunks: int) -> None:
        """Remove the last own chunks until the sequence has `num_chunks`."""
        chunks = sequence.chunks
        for index in range(len(chunks) - 1, num_chunks - 1, -1):
            if chunks[index].state is not ChunkState.DROPPED:
                self._discard(sequence, index)
        self._count_absent(sequence, num_chunks, num_chunks - len(chunks))
        del chunks[num_chunks:]

    def hand_over(self, giver: CachedSequence, taker: CachedSequence, first: int, end: int) -> None:
        """Transfer the ownership of chunks [first, end) between two sequences, at the same indices.

        Pages, slots and copies in flight stay as they are. Both sequences must list the chunks already.
        """
        moved = [0] * NUM_EVICTION_CLASSES
        for index in range(first, end):
            chunk = taker.chunks[index]
            moved[chunk.eviction_class] += 1
            if chunk.copy_id:
                self._flights[chunk.copy_id] = taker, index
        for sequence, sign in ((giver, -1), (taker, 1)):
            num_by_class = self.num_by_class[sequence.role]
            for eviction_class, number in enumerate(moved):
                sequence.num_by_class[eviction_class] += sign * number
                num_by_class[eviction_class] += sign * number
            if sequence.role is Role.IDLE:
                self._note_changed(sequence)

    def trim(self, sequence: CachedSequence) -> None:
        """Remove chunks past the computed length and dropped chunks at the end."""
        if sequence.is_trunk:
            return
        chunks, chunk_tokens = sequence.chunks, self._chunk_tokens
        num_chunks = min(len(chunks), max(-(-sequence.num_kv_tokens // chunk_tokens), sequence.num_shared))
        while num_chunks > sequence.num_shared and chunks[num_chunks - 1].state is ChunkState.DROPPED:
            num_chunks -= 1
        if num_chunks < len(chunks):
            self.shorten(sequence, num_chunks)
            sequence.num_kv_tokens = min(sequence.num_kv_tokens, num_chunks * chunk_tokens)

    def cut_copy(self, sequence: CachedSequence) -> None:
        """Limit `slot_tokens` of a truncated last chunk: other tokens may follow the remaining ones."""
        index = sequence.num_kv_tokens // self._chunk_tokens
        if sequence.num_shared <= index < len(sequence.chunks):
            chunk = sequence.chunks[index]
            chunk.slot_tokens = min(chunk.slot_tokens, sequence.num_tokens_of(index, self._chunk_tokens))

    # One chunk

    def reserve(self, sequence: CachedSequence, index: int, page: int) -> None:
        """Give a dropped chunk a page for its recomputation."""
        self._apply(sequence, index, ChunkEvent.RESERVE)
        self._set_page(sequence, index, page)

    def cancel_reserved(self, sequence: CachedSequence) -> None:
        """Free the reserved pages that no step has written."""
        for index in range(sequence.num_shared, len(sequence.chunks)):
            if sequence.chunks[index].state is ChunkState.RESERVED:
                self._apply(sequence, index, ChunkEvent.CANCEL)
                self._free_page(sequence, index)

    def write(self, sequence: CachedSequence, index: int) -> None:
        """Record that a step that writes the chunk was granted: the chunk is readable, its slot is stale."""
        chunk = sequence.chunks[index]
        if chunk.state is ChunkState.RESERVED:
            self._apply(sequence, index, ChunkEvent.FILL)
        elif chunk.slot:
            self.give_slot(sequence, index)

    def swap_out(self, sequence: CachedSequence, index: int, slot: int) -> None:
        """Begin to copy a chunk's page to `slot`; the chunk must not be known as unfit."""
        chunk = sequence.chunks[index]
        assert chunk.fits_host
        self._apply(sequence, index, ChunkEvent.SWAP_OUT)
        chunk.slot = slot
        chunk.slot_tokens = sequence.num_tokens_of(index, self._chunk_tokens)
        self._swap_outs.append(self._begin_copy(sequence, index))
        self.num_copies_out += 1

    def swap_in(self, sequence: CachedSequence, index: int, page: int) -> None:
        """Begin to copy a chunk's slot to `page`."""
        self._apply(sequence, index, ChunkEvent.SWAP_IN)
        self._set_page(sequence, index, page)
        self._swap_ins.append(self._begin_copy(sequence, index))
        self.num_copies_in += 1

    def give_page(self, sequence: CachedSequence, index: int) -> None:
        """Free the page of a chunk whose copy to the host has begun or is complete."""
        self._apply(sequence, index, ChunkEvent.GIVE_PAGE)
        self._free_page(sequence, index)

    def give_slot(self, sequence: CachedSequence, index: int) -> None:
        """Free the slot of a chunk that also has a page; a copy in flight keeps the slot until it ends."""
        chunk = sequence.chunks[index]
        self._apply(sequence, index, ChunkEvent.GIVE_SLOT)
        if chunk.copy_id:
            self._detach(chunk, is_in=False)
        self._free_slot(chunk)

    def drop(self, sequence: CachedSequence, index: int, reason: DropReason, worth: float | None) -> None:
        """Drop a chunk and report it; see `ChunkDrop` for `reason` and `worth`."""
        self._discard(sequence, index)
        self._note_drop(sequence, index, reason, worth)

    # Copies

    def take_copies(self) -> tuple[tuple[ChunkCopy, ...], tuple[ChunkCopy, ...]]:
        """Return the copies out and the copies in that began since the last call."""
        outs, ins = tuple(self._swap_outs), tuple(self._swap_ins)
        self._swap_outs, self._swap_ins = [], []
        return outs, ins

    def take_drops(self) -> tuple[ChunkDrop, ...]:
        """Return the drops since the last call."""
        drops, self._drops = tuple(self._drops), []
        return drops

    def complete(self, copy_ids: Iterable[int]) -> None:
        """Record that copies are complete, and free the places of detached ones."""
        for copy_id in copy_ids:
            flight = self._flights.pop(copy_id, None)
            if flight is None:
                detached = self._detached_copies.pop(copy_id)
                self._count_ended(is_in=detached.is_in)
                self._free_detached(detached)
            else:
                sequence, index = flight
                chunk = sequence.chunks[index]
                chunk.copy_id = 0
                self._count_ended(is_in=chunk.state is ChunkState.COPYING_IN)
                self._apply(sequence, index, ChunkEvent.ARRIVE)

    def lose(self, copy_ids: Iterable[int]) -> None:
        """Record that copies to slots failed because the chunks do not fit the packed format.

        Chunks whose pages are already freed are dropped. The others are not copied again until they change.
        """
        for copy_id in copy_ids:
            self.num_lost_copies += 1
            self.num_copies_out -= 1
            flight = self._flights.pop(copy_id, None)
            if flight is None:
                self._free_detached(self._detached_copies.pop(copy_id))
                continue
            sequence, index = flight
            chunk = sequence.chunks[index]
            chunk.copy_id = 0
            chunk.fits_host = sequence.will_write(index, self._chunk_tokens)  # its new values may fit
            self._apply(sequence, index, ChunkEvent.LOSE)
            self._free_slot(chunk)
            if chunk.state is ChunkState.DROPPED:
                self._note_drop(sequence, index, DropReason.FITS_NO_SLOT, None)
                if sequence.role is not Role.RUNNING:
                    self.trim(sequence)

    def copies_of(self, sequence: CachedSequence) -> list[int]:
        """Return the copies that must complete before a sequence's own chunks can be read."""
        classes = (EvictionClass.ARRIVING, EvictionClass.DEPARTING)
        if not any(sequence.num_by_class[eviction_class] for eviction_class in classes):
            return []
        return [
            chunk.copy_id
            for chunk in sequence.chunks[sequence.num_shared :]
            if chunk.eviction_class in classes
        ]

    def copies_that_hold_pages(self) -> list[int]:
        """Return the copies in flight whose pages cannot be evicted before the copies complete."""
        arriving = ChunkState.COPYING_IN
        own = [
            i for i, (sequence, index) in self._flights.items() if sequence.chunks[index].state is arriving
        ]
        return own + [copy_id for copy_id, detached in self._detached_copies.items() if detached.is_in]

    @property
    def flights(self) -> Mapping[int, tuple[CachedSequence, int]]:
        """Owner and index of each chunk in flight, by copy id, without detached copies."""
        return self._flights

    @property
    def detached_copies(self) -> Mapping[int, DetachedCopy]:
        """Detached copies in flight, by copy id."""
        return self._detached_copies

    def lose_device(self) -> None:
        """Drop everything that only the device or a copy in flight held; slots stay valid."""
        self._swap_outs, self._swap_ins = [], []
        for detached in self._detached_copies.values():
            self._free_detached(detached)
        for sequence, index in self._flights.values():
            sequence.chunks[index].copy_id = 0
        self._detached_copies.clear()
        self._flights.clear()
        self.num_copies_in = self.num_copies_out = 0
        for sequence in self:
            self.cancel_reserved(sequence)
            for index in range(sequence.num_shared, len(sequence.chunks)):
                self._lose_page(sequence, index)
            if sequence.role is not Role.RUNNING:
                self.trim(sequence)

    def distrust(self, sequence: CachedSequence) -> None:
        """Drop all own chunks of an idle sequence or trunk from both tiers."""
        for index in range(sequence.num_shared, len(sequence.chunks)):
            if sequence.chunks[index].state is not ChunkState.DROPPED:
                self.drop(sequence, index, DropReason.NOT_FINITE, None)
        self.trim(sequence)

    # Private methods

    def _enter(self, sequence: CachedSequence, role: Role) -> None:
        self._num_roles += 1
        self.members[role][sequence] = None
        sequence.role, sequence.role_number = role, self._num_roles
        if role is Role.IDLE:
            self._note_changed(sequence)
        elif role is Role.RUNNING and not sequence.is_trunk:
            sequence.row = self.page_table.open([chunk.page for chunk in sequence.chunks])

    def _leave_role(self, sequence: CachedSequence) -> None:
        del self.members[sequence.role][sequence]
        if sequence.row >= 0:
            self.page_table.close(sequence.row)
            sequence.row = -1

    def _apply(self, sequence: CachedSequence, index: int, event: ChunkEvent) -> None:
        chunk = sequence.chunks[index]
        state = chunk.state
        before = state.eviction_class
        chunk.state = state = next_state(state, event)
        after = state.eviction_class
        if after is before:
            return
        sequence.move(index, before, after)
        role = sequence.role
        num_by_class = self.num_by_class[role]
        num_by_class[before] -= 1
        num_by_class[after] += 1
        if role is Role.IDLE and after in self.changed:
            self.changed[after][sequence] = None

    def _count_absent(self, sequence: CachedSequence, index: int, change: int) -> None:
        """Count `change` more absent chunks. `changed` is not updated: no order covers absent chunks."""
        sequence.count(index, EvictionClass.ABSENT, change)
        self.num_by_class[sequence.role][EvictionClass.ABSENT] += change

    def _note_changed(self, sequence: CachedSequence) -> None:
        for changed in self.changed.values():
            changed[sequence] = None

    def _begin_copy(self, sequence: CachedSequence, index: int) -> ChunkCopy:
        chunk = sequence.chunks[index]
        copy_id = chunk.copy_id = self._num_copies = self._num_copies + 1
        self._flights[copy_id] = sequence, index
        return ChunkCopy(copy_id, chunk.page, chunk.slot)

    def _count_ended(self, *, is_in: bool) -> None:
        if is_in:
            self.num_copies_in -= 1
        else:
            self.num_copies_out -= 1

    def _detach(self, chunk: Chunk, *, is_in: bool) -> None:
        """Detach a chunk's copy in flight; the copy keeps the places that it uses."""
        del self._flights[chunk.copy_id]
        self._detached_copies[chunk.copy_id] = DetachedCopy(is_in, chunk.page if is_in else 0, chunk.slot)
        chunk.copy_id = chunk.slot = 0

    def _discard(self, sequence: CachedSequence, index: int) -> None:
        """Make a chunk DROPPED from any state."""
        chunk = sequence.chunks[index]
        before = chunk.state
        reserved = before is ChunkState.RESERVED
        self._apply(sequence, index, ChunkEvent.CANCEL if reserved else ChunkEvent.DROP)
        if chunk.copy_id:
            is_in = before is ChunkState.COPYING_IN
            self._detach(chunk, is_in=is_in)
            if is_in:
                self._set_page(sequence, index, 0)
        self._free_page(sequence, index)
        self._free_slot(chunk)

    def _note_drop(self, sequence: CachedSequence, index: int, why: DropReason, worth: float | None) -> None:
        drop = ChunkDrop(sequence.sequence_id, index, why, worth)
        self._drops.append(drop)
        self._on_drop(drop)

    def _lose_page(self, sequence: CachedSequence, index: int) -> None:
        state = sequence.chunks[index].state
        if state is ChunkState.ON_BOTH:
            self.give_page(sequence, index)
        elif state is ChunkState.COPYING_IN:
            self._apply(sequence, index, ChunkEvent.CANCEL)
            self._free_page(sequence, index)
        elif state not in (ChunkState.ON_CPU, ChunkState.DROPPED):
            self.drop(sequence, index, DropReason.DEVICE_LOST, None)

    def _set_page(self, sequence: CachedSequence, index: int, page: int) -> None:
        sequence.chunks[index].page = page
        if sequence.row >= 0:
            self.page_table.set(sequence.row, index, page)

    def _free_page(self, sequence: CachedSequence, index: int) -> None:
        page = sequence.chunks[index].page
        if page:
            self.pages.free(page)
            self._set_page(sequence, index, 0)

    def _free_slot(self, chunk: Chunk) -> None:
        if chunk.slot:
            self.slots.free(chunk.slot)
            chunk.slot = 0

    def _free_detached(self, detached: DetachedCopy) -> None:
        if detached.page:
            self.pages.free(detached.page)
        if detached.slot:
            self.slots.free(detached.slot)
