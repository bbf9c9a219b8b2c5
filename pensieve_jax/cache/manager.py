"""The KV cache of conversations: admission of requests, and reuse of their history.

Owns: every `CachedSequence`: pinning and reservation at admission, growth, swap-in, forks, and the count of
*available* pages (free, or evictable for a request).
Does not know: tokens, batches or devices. It changes host bookkeeping only. A freed page may be written again
at once, because one thread dispatches every step and every copy in program order.
Called by the scheduler and the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.drops import ChunkCopy, ChunkDrop
from pensieve_jax.cache.earlier_pages import EarlierPages
from pensieve_jax.cache.evictor import Evictor
from pensieve_jax.cache.integrity import check_store
from pensieve_jax.cache.order.cost import CostModel
from pensieve_jax.cache.order.learned_state import LearnedState
from pensieve_jax.cache.order.learning import make_turn_observer
from pensieve_jax.cache.order.policies import DatedWorth, make_policy
from pensieve_jax.cache.sequence import CachedSequence, Role
from pensieve_jax.cache.states import ChunkState, EvictionClass
from pensieve_jax.cache.trunks import OnMove, SharedChunks
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.clock import Clock


class CacheManager:
    """Facade of the cache.

    Attributes:
      chunk_tokens: tokens per chunk, and per page.
      page_table: the pages of running sequences, by their `row`.
      prefetch: whether chunks of queued requests are copied in early; it may be changed between steps.
      turns: observer of turns, which the eviction order may learn from; the engine calls it.
      num_prefetched_chunks: chunks copied in for requests that were still queued.
    """

    def __init__(
        self,
        config: CacheConfig,
        cost_model: CostModel,
        clock: Clock,
        *,
        max_num_copies: int,
        on_drop: Callable[[ChunkDrop], None] = lambda drop: None,
        on_move: OnMove = lambda before, after, indices: None,
        learned_state: LearnedState | None = None,
    ) -> None:
        """Start with an empty cache.

        At most `max_num_copies` copies ahead of need are in flight per direction. `on_drop` is called for
        every drop, `on_move` for chunks that change their owner. A learning order starts from
        `learned_state`.
        """
        self.chunk_tokens = config.chunk_tokens
        self.num_prefetched_chunks = 0
        self._store = ChunkStore(config.num_gpu_pages, config.num_cpu_pages, config.chunk_tokens, on_drop)
        self.page_table = self._store.page_table
        self._clock = clock
        self._reserve_pages = config.reserve_pages
        self.prefetch = config.prefetch
        self._max_num_copies = max_num_copies
        self._policy = make_policy(config.policy, cost_model, config.chunk_tokens)
        self.turns = make_turn_observer(
            self._policy, config, cost_model, clock, set_bucket=self._set_bucket, learned_state=learned_state
        )
        self._trunks = SharedChunks(
            self._store, config.chunk_tokens, on_move=on_move, on_resized=self.turns.resized
        )
        self._evictor = Evictor(
            self._store,
            self._policy,
            clock,
            num_clean_pages=config.clean_pages,
            max_num_copies=max_num_copies,
            retrieval_priority=config.retrieval_priority,
        )

    # Sequences

    def open(self, sequence_id: str) -> CachedSequence:
        """Create an empty, idle sequence."""
        sequence = CachedSequence(sequence_id)
        self._store.add(sequence)
        return sequence

    def close(self, sequence: CachedSequence) -> None:
        """Forget a sequence and free what it holds."""
        self.truncate(sequence, 0)
        self._store.remove(sequence)

    def fork(self, source: CachedSequence, num_tokens: int, sequence_id: str) -> CachedSequence:
        """Create an idle sequence that begins as `source` does, in any role of `source`.

        They share the full chunks among the first `num_tokens` computed tokens. The first of them to run
        recomputes the shared chunks that are in neither tier. No KV is copied.
        """
        fork = self.open(sequence_id)
        fork.last_active_s, fork.bucket = source.last_active_s, source.bucket
        num_chunks = min(num_tokens, source.num_kv_tokens) // self.chunk_tokens
        self._trunks.join(fork, self._trunks.trunk_at(source, num_chunks))
        return fork

    def prepare_fork(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Prepare an idle sequence so that its forks share all full chunks of `num_tokens` tokens.

        These need not be computed yet. A partly computed last chunk is computed anew.
        """
        assert sequence.role is Role.IDLE
        num_chunks = num_tokens // self.chunk_tokens
        num_computed = sequence.num_kv_tokens // self.chunk_tokens
        if num_chunks > num_computed:
            self.truncate(sequence, num_computed * self.chunk_tokens)
            self._store.extend(sequence, num_chunks)
            sequence.num_kv_tokens = num_chunks * self.chunk_tokens
            self._trunks.trunk_at(sequence, num_chunks)

    def open_prefix(self, sequence_id: str, num_tokens: int) -> CachedSequence:
        """Create a held trunk of the full chunks of `num_tokens` tokens, without computing them."""
        prefix = self._trunks.create_held(sequence_id, num_tokens // self.chunk_tokens)
        self.touch(prefix)
        return prefix

    def release_prefix(self, prefix: CachedSequence) -> None:
        """Forget a prefix as soon as no sequence begins with it; do not `share` it afterwards."""
        self._trunks.release(prefix)

    def share(self, sequence: CachedSequence, prefix: CachedSequence) -> None:
        """Make an empty, idle sequence begin with the chunks of a prefix."""
        assert not sequence.chunks and sequence.role is Role.IDLE and prefix.is_held
        self._trunks.join(sequence, prefix)

    def truncate(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Keep at most the KV of the first `num_tokens` tokens, and free reserved pages.

        A shared chunk that the cut divides is not kept at all.
        """
        self._store.cancel_reserved(sequence)
        sequence.num_kv_tokens = min(sequence.num_kv_tokens, num_tokens)
        self._store.trim(sequence)
        self._store.cut_copy(sequence)
        if sequence.num_kv_tokens < sequence.num_shared * self.chunk_tokens:
            self._trunks.cut(sequence, sequence.num_kv_tokens // self.chunk_tokens)

    def distrust(self, sequence: CachedSequence) -> None:
        """Drop the KV of an idle sequence and of its trunks, as it may be wrong.

        Trunks that running requests share stay. If their KV is wrong, those requests drop it when they end.
        """
        for own in sequence.lineage():
            if own.role is Role.IDLE:
                self._store.distrust(own)

    def touch(self, sequence: CachedSequence) -> None:
        """Record activity now, of the sequence and of its trunks."""
        now_s = self._clock.now()
        self._store.set_active(sequence, now_s)
        trunk = sequence.trunk
        while trunk is not None:
            self._store.set_active(trunk, now_s)
            self._store.set_bucket(trunk, sequence.bucket)
            trunk = trunk.trunk

    def push_out(self, sequence: CachedSequence, max_num_chunks: int | None = None) -> int:
        """Copy an idle sequence's pages, or only the leading ones, to the host and free them now.

        Returns how many. Chunks that host memory has no room for are dropped.
        """
        assert sequence.role is Role.IDLE
        self._evictor.begin_pass()
        return self._evictor.push_out(
            sequence, len(sequence.chunks) if max_num_chunks is None else max_num_chunks
        )

    # Room

    def num_available(self, requester: CachedSequence | None = None) -> int:
        """Return the number of pages that are free, idle, or held by queued sequences that give way.

        Queued sequences give way to `requester` if they arrived after it; without a requester, all count.
        Pages of `requester` and its trunks do not count.
        """
        if requester is not None:
            return self._num_available(requester, requester.arrival)
        store = self._store
        return store.pages.num_free + store.num_resident(Role.IDLE) + store.num_resident(Role.QUEUED)

    def earlier_pages(self) -> EarlierPages:
        """Return a count of the pages of earlier arrivals, to which the caller adds them."""
        return EarlierPages(self._store.pages.num_places, self._reserve_pages, self.chunk_tokens)

    def begin_step(self) -> None:
        """Begin a scheduling pass."""
        self._evictor.begin_pass()

    def end_step(self) -> None:
        """Begin copies ahead of need: swap in for queued requests, then swap out idle chunks."""
        if self.prefetch:
            self._prefetch_for_queued()
        self._evictor.swap_out_ahead()

    def complete(self, copy_ids: Iterable[int]) -> None:
        """Record that copies are complete: steps granted from here on may use their pages and slots."""
        self._store.complete(copy_ids)

    def lose(self, copy_ids: Iterable[int]) -> None:
        """Record that copies to host memory failed because the chunks do not fit its packed format."""
        self._store.lose(copy_ids)

    def take_copies(self) -> tuple[tuple[ChunkCopy, ...], tuple[ChunkCopy, ...]]:
        """Return the copies out and in that began since the last call; start them before the next step."""
        return self._store.take_copies()

    def take_drops(self) -> tuple[ChunkDrop, ...]:
        """Return the drops since the last call."""
        return self._store.take_drops()

    # The life of a request

    def enqueue(self, sequence: CachedSequence, arrival: int) -> None:
        """Mark a sequence as queued: only earlier arrivals may evict its chunks."""
        sequence.arrival = arrival
        sequence.fetched.clear()
        self._store.set_role(sequence, Role.QUEUED)

    def try_admit(
        self, sequence: CachedSequence, num_tokens: int, *, waive_reserve: bool, latest_arrival: int = -1
    ) -> bool:
        """Pin a queued sequence, allocate pages for `num_tokens` tokens, and begin to copy its chunks in.

        Queued sequences give way if they arrived after it and after `latest_arrival`, the arrival number of
        the latest running request: that one gives way before them.

        Returns False, with nothing changed, if too few pages are available, if fewer than the reserve would
        remain available (the paper's section 4.3.5), or while one of its chunks is being copied out.
        """
        assert sequence.role is Role.QUEUED
        if self.is_departing(sequence):
            return False
        arrival = max(sequence.arrival, latest_arrival)
        num_chunks = max(-(-num_tokens // self.chunk_tokens), len(sequence.chunks))
        num_needed = num_chunks - sum(chunk.page != 0 for chunk in sequence.chunks)
        num_left = self._num_available(sequence, arrival) - num_needed
        if num_left < (0 if waive_reserve else self._reserve_pages):
            return False
        self._pin(sequence)
        self._store.extend(sequence, num_chunks)
        for index, chunk in enumerate(sequence.chunks):
            if not chunk.page:
                self._set_page_aside(sequence, index, arrival)
        index = sequence.num_kv_tokens // self.chunk_tokens
        if sequence.num_shared <= index < len(sequence.chunks):
            sequence.chunks[index].fits_host = True  # its new values may fit
        return True

    def is_departing(self, sequence: CachedSequence) -> bool:
        """Return whether a chunk of a sequence or its trunks is being copied out without a page."""
        return any(own.num_by_class[EvictionClass.DEPARTING] for own in sequence.lineage())

    def grow(self, sequence: CachedSequence, num_tokens: int, *, latest_arrival: int = -1) -> bool:
        """Reserve the pages that a running sequence of `num_tokens` lacks; False if none can be evicted.

        `latest_arrival` limits which queued sequences give way; see `try_admit`.
        """
        assert sequence.role is Role.RUNNING
        while len(sequence.chunks) * self.chunk_tokens < num_tokens:
            page = self._evictor.allocate_page(max(sequence.arrival, latest_arrival))
            if page is None:
                return False
            self._store.extend(sequence, len(sequence.chunks) + 1)
            self._store.reserve(sequence, len(sequence.chunks) - 1, page)
        return True

    def fill(self, sequence: CachedSequence, start: int, end: int) -> None:
        """Record that a step that computes tokens [start, end) was granted: their KV counts from now on."""
        for index in range(start // self.chunk_tokens, -(-end // self.chunk_tokens)):
            self._store.write(sequence.owner_of(index), index)
        sequence.num_kv_tokens = max(sequence.num_kv_tokens, end)

    def fill_next(self, sequences: Iterable[CachedSequence]) -> None:
        """Call `fill` for the next token of each sequence."""
        chunk_tokens = self.chunk_tokens
        for sequence in sequences:
            position = sequence.num_kv_tokens
            if position % chunk_tokens == 0 or sequence.chunks[position // chunk_tokens].slot:
                self.fill(sequence, position, position + 1)
            sequence.num_kv_tokens = position + 1  # enough where the chunk was written before and has no slot

    def expedite(self, sequence: CachedSequence) -> tuple[int, ...]:
        """Make chunks that are being copied in for a running sequence readable by the next step.

        Returns the ids of the copies, for `Transfers.expedite`: that step must wait for them. Returns none
        while more copies are in flight than a step can wait for.
        """
        if self._store.num_copies_in > self._max_num_copies:
            return ()
        copy_ids = [
            chunk.copy_id for chunk in sequence.chunks if chunk.state is ChunkState.COPYING_IN
        ]  # including chunks of its trunks
        self._store.complete(copy_ids)
        return tuple(copy_ids)

    def blocking_copies(self, sequence: CachedSequence) -> list[int]:
        """Return the copies in flight that a request's sequence waits for."""
        copy_ids = [copy_id for own in sequence.lineage() for copy_id in self._store.copies_of(own)]
        if sequence.role is Role.QUEUED:
            copy_ids += self._store.copies_that_hold_pages()
        return copy_ids

    def suspend(self, sequence: CachedSequence) -> None:
        """Queue a running sequence again; its chunks are swapped out as other requests need the pages."""
        sequence.fetched.clear()
        self._unpin(sequence, Role.QUEUED)

    def release(self, sequence: CachedSequence) -> None:
        """Mark a sequence as idle and active now; no request needs it any more."""
        self.touch(sequence)
        self._unpin(sequence, Role.IDLE)

    def lose_device(self) -> None:
        """Drop all chunks without a valid slot after the device pools were lost."""
        self._store.lose_device()

    # For reports

    def held(self) -> Iterator[tuple[str, int]]:
        """Yield the sequence id and index of every chunk that is in a tier or in flight."""
        for sequence in self._store:
            for index in range(sequence.num_shared, len(sequence.chunks)):
                if sequence.chunks[index].eviction_class is not EvictionClass.ABSENT:
                    yield sequence.sequence_id, index

    def worth_of(self, sequence: CachedSequence, index: int) -> float:
        """Return the policy's current retention value of a chunk of an idle sequence."""
        return self._policy.worth(sequence, index, self._clock.now())

    def describe_worths(self, worths: Sequence[DatedWorth]) -> str:
        """Describe retention values for users, in the unit of the policy."""
        return self._policy.describe(worths)

    def census(self) -> dict[str, int]:
        """Count the chunks by state, and the free pages and slots."""
        states = Counter(
            chunk.state for sequence in self._store for chunk in sequence.chunks[sequence.num_shared :]
        )
        for detached in self._store.detached_copies.values():  # detached copies still hold places
            states[ChunkState.COPYING_IN if detached.is_in else ChunkState.LEAVING] += 1
        counts = {state.value: states[state] for state in ChunkState if state is not ChunkState.DROPPED}
        return counts | {"free pages": self._store.pages.num_free, "free slots": self._store.slots.num_free}

    def stats(self) -> dict[str, int | float]:
        """Return sizes, free places, and the counters of eviction and learning."""
        return {
            "num_gpu_pages": self._store.pages.num_places,
            "num_available_gpu_pages": self.num_available(),
            "num_free_gpu_pages": self._store.pages.num_free,
            "num_cpu_pages": self._store.slots.num_places,
            "num_free_cpu_pages": self._store.slots.num_free,
            "num_forced_swap_outs": self._evictor.num_forced_swap_outs,
            "num_lost_copies": self._store.num_lost_copies,
            "num_prefetched_chunks": self.num_prefetched_chunks,
            **self.turns.stats(),
        }

    def check_integrity(self) -> None:
        """Assert that states, places, copies, counts and roles agree."""
        check_store(self._store, self.chunk_tokens)

    # Private methods

    def _set_bucket(self, sequence: CachedSequence, bucket: int) -> None:
        """Set the bucket of a sequence and of its trunks; all may be idle by now."""
        for own in sequence.lineage():
            self._store.set_bucket(own, bucket)

    def _num_available(self, requester: CachedSequence, arrival: int) -> int:
        """Return the pages available to `requester` if only queued sequences after `arrival` give way."""
        store = self._store
        available = store.pages.num_free + store.num_resident(Role.IDLE)
        if store.num_resident(Role.QUEUED):
            available += sum(one.num_resident for one in store.members[Role.QUEUED] if one.arrival > arrival)
        own: CachedSequence | None = requester
        while own is not None and own.role is not Role.RUNNING:
            if own.role is Role.IDLE:
                available -= own.num_resident
            own = own.trunk
        return available

    def _set_page_aside(self, sequence: CachedSequence, index: int, arrival: int) -> None:
        page = self._evictor.allocate_page(arrival)
        assert page is not None, "available pages were miscounted"
        owner = sequence.owner_of(index)
        if owner.chunks[index].state is ChunkState.ON_CPU:
            self._store.swap_in(owner, index, page)
        else:
            self._store.reserve(owner, index, page)
        if owner is not sequence:  # users read their trunk's pages through their own row
            self._store.page_table.set(sequence.row, index, page)

    def _pin(self, sequence: CachedSequence) -> None:
        self._store.set_role(sequence, Role.RUNNING)
        self._trunks.pin(sequence)

    def _unpin(self, sequence: CachedSequence, role: Role) -> None:
        if sequence.role is Role.RUNNING:
            self._trunks.unpin(sequence)
        self._store.cancel_reserved(sequence)
        self._store.trim(sequence)
        self._store.set_role(sequence, role)
        self._trunks.merge_idle(sequence)

    def _prefetch_for_queued(self) -> None:
        """Copy in chunks of queued requests, in order of arrival, into pages that need no swap-out."""
        store = self._store
        queued = store.members[Role.QUEUED] if store.num_by_class[Role.QUEUED][EvictionClass.HOST] else ()
        for sequence in sorted(queued, key=lambda s: s.arrival):
            while sequence.num_by_class[EvictionClass.HOST]:
                if store.num_copies_in >= self._max_num_copies or self.num_available() <= self._reserve_pages:
                    return
                index = sequence.first_of(EvictionClass.HOST)
                page = self._evictor.allocate_spare_page()
                if page is None:
                    return
                store.swap_in(sequence, index, page)
                sequence.fetched.add(index)
                self.num_prefetched_chunks += 1
