"""The cache of conversation state: who holds which pages, and who gives way.

Owns: every `CachedSequence`, pinning and reserving at admission, growing, dropping by policy, and the
count of pages that are *available* (free, or held by somebody who must give way).
Does not know: tokens, batches, devices. It changes host state only; that a page may be written again at
once follows from program order, since every step is dispatched by one thread.
Called by: the scheduler for requests, the engine for what happens between turns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from pensieve_jax.cache.policies import EvictionPolicy, VictimGroup
from pensieve_jax.cache.sequence import CachedSequence, Chunk, Role
from pensieve_jax.cache.states import ChunkEvent, ChunkState
from pensieve_jax.cache.tiers import Tier
from pensieve_jax.core.clock import Clock


class CacheManager:
    """Facade of the cache.

    Attributes:
      chunk_tokens: tokens of a chunk, and of a page.
    """

    def __init__(
        self, pool: Tier, policy: EvictionPolicy, clock: Clock, *, chunk_tokens: int, reserve_pages: int
    ) -> None:
        """An empty cache over `pool`; `reserve_pages` stay available when a request joins running ones."""
        self.chunk_tokens = chunk_tokens
        self._pool = pool
        self._policy = policy
        self._clock = clock
        self._reserve_pages = reserve_pages
        # In the order in which they took the role, which makes ties reproducible.
        self._sequences: dict[Role, dict[CachedSequence, None]] = {role: {} for role in Role}
        self._num_resident = dict.fromkeys(Role, 0)
        self._idle_victims: Iterator[VictimGroup] = iter(())
        self._queued_victims: Iterator[CachedSequence] = iter(())
        self._drops: list[tuple[str, int]] = []

    # Sequences

    def open(self, sequence_id: str) -> CachedSequence:
        """A new, empty, idle sequence."""
        sequence = CachedSequence(sequence_id)
        self._sequences[sequence.role][sequence] = None
        return sequence

    def close(self, sequence: CachedSequence) -> None:
        """Forget a sequence and free its pages."""
        self.truncate(sequence, 0)
        del self._sequences[sequence.role][sequence]

    def truncate(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Keep the KV of the first `num_tokens` tokens at most; what is reserved is given back."""
        self._cancel_reserved(sequence)
        sequence.num_kv_tokens = min(sequence.num_kv_tokens, num_tokens)
        self._trim(sequence)

    def touch(self, sequence: CachedSequence) -> None:
        """Record activity now."""
        sequence.last_active_s = self._clock.now()

    # Room

    @property
    def num_pages(self) -> int:
        """Pages of the device tier."""
        return self._pool.num_pages

    def num_available(self, requester: CachedSequence | None = None) -> int:
        """Pages that are free or held by idle or queued sequences other than `requester`."""
        available = self._pool.num_free + self._num_resident[Role.IDLE] + self._num_resident[Role.QUEUED]
        if requester is not None and requester.role is not Role.RUNNING:
            available -= requester.num_resident
        return available

    def begin_step(self) -> None:
        """Start a scheduling pass: the order of victims is made afresh when the first is needed.

        Conversations that go idle within the pass were active just now: they come last, when the others
        have nothing left.
        """
        self._idle_victims = iter(())
        self._queued_victims = iter(())

    def take_drops(self) -> tuple[tuple[str, int], ...]:
        """(sequence id, chunk index) of what was evicted since the last call."""
        drops, self._drops = tuple(self._drops), []
        return drops

    # The life of a request

    def enqueue(self, sequence: CachedSequence, arrival: int) -> None:
        """A request waits for its turn: its chunks give way to earlier arrivals only."""
        sequence.arrival = arrival
        self._set_role(sequence, Role.QUEUED)

    def try_admit(self, sequence: CachedSequence, num_tokens: int, *, waive_reserve: bool) -> bool:
        """Pin a queued sequence and reserve pages for all of `num_tokens` tokens that have none.

        Returns False, with nothing changed, while fewer pages than it needs are available, or fewer than
        the reserve would stay so (the paper's section 4.3.5).
        """
        assert sequence.role is Role.QUEUED
        num_chunks = -(-num_tokens // self.chunk_tokens)
        num_left = self.num_available(sequence) - (num_chunks - sequence.num_resident)
        if num_left < (0 if waive_reserve else self._reserve_pages):
            return False
        self._set_role(sequence, Role.RUNNING)
        sequence.chunks += (Chunk() for _ in range(num_chunks - len(sequence.chunks)))
        for index, chunk in enumerate(sequence.chunks):
            if chunk.state is ChunkState.DROPPED:
                reserved = self._reserve(sequence, index)
                assert reserved, "available pages were miscounted"
        return True

    def grow(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Reserve the pages that a running sequence of `num_tokens` lacks; False where none gives way."""
        assert sequence.role is Role.RUNNING
        while len(sequence.chunks) * self.chunk_tokens < num_tokens:
            sequence.chunks.append(Chunk())
            if not self._reserve(sequence, len(sequence.chunks) - 1):
                sequence.chunks.pop()
                return False
        return True

    def fill(self, sequence: CachedSequence, start: int, end: int) -> None:
        """A step that computes tokens [start, end) was granted: their KV counts from here on."""
        for index in range(start // self.chunk_tokens, -(-end // self.chunk_tokens)):
            chunk = sequence.chunks[index]
            if chunk.state is ChunkState.RESERVED:
                self._apply(sequence, chunk, ChunkEvent.FILL)
                sequence.on_filled(index)
        sequence.num_kv_tokens = max(sequence.num_kv_tokens, end)

    def suspend(self, sequence: CachedSequence) -> None:
        """A running sequence gives way: unpinned and queued again; what it computed stays while it can."""
        self._unpin(sequence, Role.QUEUED)

    def release(self, sequence: CachedSequence) -> None:
        """No request needs the sequence any more: it is idle from here on, active just now."""
        self.touch(sequence)
        self._unpin(sequence, Role.IDLE)

    def lose_device(self) -> None:
        """The device pools were rebuilt: every chunk is dropped."""
        for sequence in self._all():
            self._cancel_reserved(sequence)
            for index in sequence.resident_indices():
                self._drop(sequence, index)
            if sequence.role is not Role.RUNNING:
                self._trim(sequence)

    # Inside

    def _all(self) -> Iterator[CachedSequence]:
        return itertools.chain.from_iterable(self._sequences.values())

    def _set_role(self, sequence: CachedSequence, role: Role) -> None:
        del self._sequences[sequence.role][sequence]
        self._sequences[role][sequence] = None
        self._num_resident[sequence.role] -= sequence.num_resident
        self._num_resident[role] += sequence.num_resident
        sequence.role = role

    def _unpin(self, sequence: CachedSequence, role: Role) -> None:
        self._cancel_reserved(sequence)
        self._trim(sequence)
        self._set_role(sequence, role)

    def _apply(self, sequence: CachedSequence, chunk: Chunk, event: ChunkEvent) -> None:
        was_resident = chunk.state is ChunkState.ON_GPU
        chunk.apply(event)
        change = (chunk.state is ChunkState.ON_GPU) - was_resident
        sequence.num_resident += change
        self._num_resident[sequence.role] += change

    def _free(self, sequence: CachedSequence, index: int, event: ChunkEvent) -> None:
        chunk = sequence.chunks[index]
        self._apply(sequence, chunk, event)
        self._pool.free(chunk.page)
        sequence.set_page(index, 0)

    def _drop(self, sequence: CachedSequence, index: int) -> None:
        self._free(sequence, index, ChunkEvent.DROP)
        self._drops.append((sequence.sequence_id, index))

    def _reserve(self, sequence: CachedSequence, index: int) -> bool:
        if not self._pool.num_free and not self._reclaim(sequence.arrival):
            return False
        self._apply(sequence, sequence.chunks[index], ChunkEvent.RESERVE)
        sequence.set_page(index, self._pool.allocate())
        return True

    def _cancel_reserved(self, sequence: CachedSequence) -> None:
        for index, chunk in enumerate(sequence.chunks):
            if chunk.state is ChunkState.RESERVED:
                self._free(sequence, index, ChunkEvent.CANCEL)

    def _trim(self, sequence: CachedSequence) -> None:
        """Restore the invariant at the tail: no chunk past the computed length, none dropped at the end."""
        chunks = sequence.chunks
        while chunks:
            start = (len(chunks) - 1) * self.chunk_tokens
            if start < sequence.num_kv_tokens and chunks[-1].state is not ChunkState.DROPPED:
                return
            if chunks[-1].state is ChunkState.ON_GPU:
                self._free(sequence, len(chunks) - 1, ChunkEvent.DROP)
            chunks.pop()
            sequence.num_kv_tokens = min(sequence.num_kv_tokens, start)

    def _reclaim(self, arrival: int) -> bool:
        """Drop the next victim group, idle chunks before those of later arrivals; False where none is."""
        while self._num_resident[Role.IDLE]:
            for sequence, indices in self._idle_victims:
                if sequence.role is Role.IDLE:
                    self._drop_group(sequence, indices)
                    return True
            idle = tuple(self._sequences[Role.IDLE])
            self._idle_victims = self._policy.victims(idle, self._clock.now())
        while self._num_resident[Role.QUEUED]:
            for sequence in self._queued_victims:
                if sequence.role is Role.QUEUED:
                    assert sequence.arrival > arrival, "a queued request arrived before one that runs"
                    self._drop_group(sequence, self._policy.frontier(sequence))
                    return True
            self._queued_victims = self._latest_first(tuple(self._sequences[Role.QUEUED]))
        return False

    @staticmethod
    def _latest_first(queued: Sequence[CachedSequence]) -> Iterator[CachedSequence]:
        """Each sequence again and again while it has something to give, the latest arrival first."""
        for sequence in sorted(queued, key=lambda s: -s.arrival):
            while sequence.num_resident and sequence.role is Role.QUEUED:
                yield sequence

    def _drop_group(self, sequence: CachedSequence, indices: Sequence[int]) -> None:
        for index in indices:
            self._drop(sequence, index)
        self._trim(sequence)

    def check_integrity(self) -> None:
        """Assert that states, pages, counts and roles agree, here and in the pool."""
        owners: Counter[int] = Counter()
        num_resident = dict.fromkeys(Role, 0)
        assert all(s.role is role for role, members in self._sequences.items() for s in members)
        for sequence in self._all():
            row = sequence.page_row
            for index, chunk in enumerate(sequence.chunks):
                assert (chunk.page != 0) == (chunk.state is not ChunkState.DROPPED), (
                    f"{sequence.sequence_id}[{index}] is {chunk.state.value} with page {chunk.page}"
                )
                assert row[index] == chunk.page, "the page row and a chunk disagree"
                if chunk.page:
                    owners[chunk.page] += 1
                if chunk.state is ChunkState.RESERVED:
                    assert sequence.role is Role.RUNNING, "an unpinned sequence holds a reserved page"
            assert sequence.num_resident == len(sequence.resident_indices())
            num_resident[sequence.role] += sequence.num_resident
            num_computed_chunks = -(-sequence.num_kv_tokens // self.chunk_tokens)
            assert num_computed_chunks <= len(sequence.chunks), "computed tokens without a chunk"
            if sequence.role is not Role.RUNNING:
                assert num_computed_chunks == len(sequence.chunks), "a chunk past the computed tokens"
                last = sequence.chunks[-1] if sequence.chunks else None
                assert last is None or last.state is ChunkState.ON_GPU, "the last chunk is dropped"
        assert num_resident == self._num_resident, f"{num_resident} resident, counted {self._num_resident}"
        assert all(count == 1 for count in owners.values()), "a page has two owners"
        self._pool.check_integrity(dict(owners))
