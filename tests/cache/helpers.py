"""Caches and sequences in a given state, created through the manager's own calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve_jax.cache import (
    AnalyticCostModel,
    CachedSequence,
    CacheManager,
    ChunkCopy,
    DropReason,
    EvictionClass,
    LearnedState,
    Role,
    TierPool,
    make_policy,
)
from pensieve_jax.cache.order.policy_selector import PolicyLosses
from pensieve_jax.cache.order.returns import NUM_BINS, NUM_BUCKETS, ReturnModel
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.clock import VirtualClock

CHUNK = 16


class Cache:
    """A manager with its pools and clock, and shorthands for the calls of requests and transfers.

    Attributes:
        copies_out, copies_in: copies in flight, by copy id.
    """

    def __init__(
        self,
        num_pages: int = 20,
        cpu_pages: int = 0,
        *,
        policy: str = "retention",
        reserve_pages: int = 0,
        clean_pages: int = 0,
        retrieval_priority: bool = True,
        prefetch: bool = True,
        max_num_copies: int = 64,
    ) -> None:
        self.clock = VirtualClock(100.0)
        config = CacheConfig(
            gpu_pages=num_pages,
            cpu_pages=cpu_pages,
            chunk_tokens=CHUNK,
            policy=policy,
            reserve_fraction=reserve_pages / num_pages,
            swap_out_fraction=min((clean_pages + 0.5) / num_pages, 0.999),
            retrieval_priority=retrieval_priority,
            prefetch=prefetch,
        )
        cost_model = AnalyticCostModel(CHUNK, num_weights=1e3, attention_width=1e3)
        self.policy = make_policy(policy, cost_model, CHUNK)
        self.manager = CacheManager(config, cost_model, self.clock, max_num_copies=max_num_copies)
        self.copies_out: dict[int, ChunkCopy] = {}
        self.copies_in: dict[int, ChunkCopy] = {}
        self._num_arrivals = 0

    @property
    def pool(self) -> TierPool:
        return self.manager._store.pages

    @property
    def slots(self) -> TierPool:
        return self.manager._store.slots

    def take_drops(self) -> list[tuple[str, int]]:
        """Return sequence and chunk of the drops since the last call."""
        return [(drop.conversation_id, drop.index) for drop in self.manager.take_drops()]

    # Sequences

    def queued(self, name: str, sequence: CachedSequence | None = None) -> CachedSequence:
        sequence = sequence or self.manager.open(name)
        self.manager.enqueue(sequence, self._num_arrivals)
        self._num_arrivals += 1
        return sequence

    def running(self, name: str, num_tokens: int, sequence: CachedSequence | None = None) -> CachedSequence:
        """Create a sequence that was admitted and computed up to `num_tokens`."""
        sequence = self.queued(name, sequence)
        self.manager.begin_step()
        assert self.manager.try_admit(sequence, num_tokens, waive_reserve=True)
        self.manager.fill(sequence, 0, num_tokens)
        self.manager.check_integrity()
        return sequence

    def idle(self, name: str, num_tokens: int, idle_s: float = 0.0) -> CachedSequence:
        """Create a sequence whose turn ended `idle_s` seconds ago."""
        sequence = self.running(name, num_tokens)
        self.manager.release(sequence)
        self.manager._store.set_active(sequence, self.clock.now() - idle_s)
        self.check()
        return sequence

    def on_both(
        self, name: str, num_tokens: int, idle_s: float = 0.0, *, but: Sequence[int] = ()
    ) -> CachedSequence:
        """Create an idle sequence with a complete copy of every chunk but some."""
        sequence = self.idle(name, num_tokens, idle_s)
        for index in range(len(sequence.chunks)):
            if index not in but:
                self.manager._store.swap_out(sequence, index, self.slots.allocate())
        self.complete()
        return sequence

    def on_cpu(
        self, name: str, num_tokens: int, idle_s: float = 0.0, *, but: Sequence[int] = ()
    ) -> CachedSequence:
        """Create an idle sequence in host memory only, except some chunks, which are on the GPU only."""
        sequence = self.on_both(name, num_tokens, idle_s, but=but)
        for index in sequence.indices_of(EvictionClass.CLEAN):
            self.manager._store.give_page(sequence, index)
        self.check()
        return sequence

    def drop(self, sequence: CachedSequence, *chunks: int) -> None:
        for chunk in chunks:
            self.manager._store.drop(sequence, chunk, DropReason.NO_HOST_MEMORY, None)
        self.check()

    # Copies

    def begin(self) -> tuple[list[ChunkCopy], list[ChunkCopy]]:
        """Take the copies that began, out and in."""
        outs, ins = self.manager.take_copies()
        self.copies_out.update((copy.copy_id, copy) for copy in outs)
        self.copies_in.update((copy.copy_id, copy) for copy in ins)
        return list(outs), list(ins)

    def complete(self, *copy_ids: int) -> None:
        """Complete these copies, or all that began."""
        self.begin()
        done = copy_ids or (*self.copies_out, *self.copies_in)
        for copy_id in done:
            self.copies_out.pop(copy_id, None)
            self.copies_in.pop(copy_id, None)
        self.manager.complete(done)
        self.check()

    def lose(self, *copy_ids: int) -> None:
        """End these copies out as lost: their slots hold nothing."""
        self.begin()
        for copy_id in copy_ids:
            del self.copies_out[copy_id]
        self.manager.lose(copy_ids)
        self.check()

    def end_step(self) -> tuple[list[ChunkCopy], list[ChunkCopy]]:
        """Run a pass without requests; return the copies that it began."""
        self.manager.begin_step()
        self.manager.end_step()
        self.check()
        return self.begin()

    def check(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_available() == self.pool.num_free + sum(
            sequence.num_resident for sequence in self.manager._store if sequence.role is not Role.RUNNING
        )


def habits(seed: int) -> ReturnModel:
    """Draw a model of many returns by seed."""
    rng = np.random.default_rng(seed)
    shape = NUM_BUCKETS, NUM_BINS
    returns, exposure_s = rng.integers(0, 50, shape), rng.integers(1, 10_000, shape)
    return ReturnModel(returns.astype(float), exposure_s.astype(float))


def learned_state_of(seed: int, followed: str = "returns") -> LearnedState:
    """Return the learned state of an order for users with `habits`."""
    model = habits(seed)
    return LearnedState(
        model.returns, model.exposure_s, followed, PolicyLosses((0.0,) * 3, ((0.0,) * 3,) * 3)
    )


def resident(sequence: CachedSequence) -> list[int]:
    """Return the chunks that steps can read."""
    return [index for index, chunk in enumerate(sequence.chunks) if chunk.readable]


def states(sequence: CachedSequence) -> list[str]:
    """Return the state of each chunk."""
    return [chunk.state.value for chunk in sequence.chunks]


def pages_of(sequence: CachedSequence) -> list[int]:
    """Return the page of each chunk."""
    return [chunk.page for chunk in sequence.chunks]
