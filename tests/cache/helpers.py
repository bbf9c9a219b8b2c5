"""Caches and sequences in a wanted state, made through the manager's own calls."""

from __future__ import annotations

from pensieve_jax.cache import AnalyticCostModel, CachedSequence, CacheManager, PagePool, Role, make_policy
from pensieve_jax.core.clock import VirtualClock

CHUNK = 16


class Cache:
    """A manager with its pool and clock, and shorthands for what requests do."""

    def __init__(self, num_pages: int = 20, *, policy: str = "retention", reserve_pages: int = 0) -> None:
        self.clock = VirtualClock(100.0)
        self.pool = PagePool(num_pages)
        cost_model = AnalyticCostModel(CHUNK, num_weights=1e3, attention_width=1e3)
        self.policy = make_policy(policy, cost_model, CHUNK)
        self.manager = CacheManager(
            self.pool, self.policy, self.clock, chunk_tokens=CHUNK, reserve_pages=reserve_pages
        )
        self._num_arrivals = 0

    def queued(self, name: str, sequence: CachedSequence | None = None) -> CachedSequence:
        sequence = sequence or self.manager.open(name)
        self.manager.enqueue(sequence, self._num_arrivals)
        self._num_arrivals += 1
        return sequence

    def running(self, name: str, num_tokens: int, sequence: CachedSequence | None = None) -> CachedSequence:
        """A sequence that was admitted and computed up to `num_tokens`."""
        sequence = self.queued(name, sequence)
        self.manager.begin_step()
        assert self.manager.try_admit(sequence, num_tokens, waive_reserve=True)
        self.manager.fill(sequence, 0, num_tokens)
        self.manager.check_integrity()
        return sequence

    def idle(self, name: str, num_tokens: int, idle_s: float = 0.0) -> CachedSequence:
        """A sequence whose turn ended `idle_s` seconds ago."""
        sequence = self.running(name, num_tokens)
        self.manager.release(sequence)
        sequence.last_active_s = self.clock.now() - idle_s
        self.check()
        return sequence

    def drop(self, sequence: CachedSequence, *chunks: int) -> None:
        for chunk in chunks:
            self.manager._drop(sequence, chunk)
        self.check()

    def check(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_available() == self.pool.num_free + sum(
            sequence.num_resident for sequence in self.manager._all() if sequence.role is not Role.RUNNING
        )


def resident(sequence: CachedSequence) -> list[int]:
    """Chunks on the gpu."""
    return list(sequence.resident_indices())
