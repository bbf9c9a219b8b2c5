"""Whose chunks go first: four orders behind one contract.

Owns: the order of victims among idle sequences. A policy sees sequences, a shelf and the time; it counts
nothing, frees nothing and keeps no state between passes.
Called by: `Evictor`, through a `VictimQueue` for each shelf that it needs room on.

A pass over thousands of conversations takes a few chunks: one number is computed for each of them, and only
those that gave something are looked at again.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from pensieve_jax.cache.cost import CostModel
from pensieve_jax.cache.sequence import CachedSequence, Role
from pensieve_jax.cache.states import Shelf

_MIN_IDLE_S = 1e-3  # a conversation that was active just now has a finite value


class EvictionPolicy(ABC):
    """The order in which idle chunks leave a shelf: one frontier a sequence, the lowest worth first."""

    name: str

    @abstractmethod
    def frontier(self, sequence: CachedSequence, shelf: Shelf) -> Sequence[int]:
        """The chunks of a sequence that leave the shelf next, together; there is at least one on it."""

    @abstractmethod
    def worth(self, sequence: CachedSequence, index: int, now_s: float) -> float:
        """What keeping chunk `index` is worth; comparable across sequences and shelves."""


class VictimQueue:
    """The idle sequences with chunks on one shelf, by the worth of what goes next of each.

    Ties fall to the sequence that was given first. What was true of a sequence when the queue was made may
    have changed since: it is looked at again when it comes to the front.
    """

    def __init__(
        self, policy: EvictionPolicy, sequences: Iterable[CachedSequence], shelf: Shelf, now_s: float
    ) -> None:
        """Look at every sequence once."""
        self._policy, self._shelf, self._now_s = policy, shelf, now_s
        self._heap = [(self._worth(s), order, s) for order, s in enumerate(sequences) if s.num_on[shelf]]
        heapq.heapify(self._heap)

    def peek(self) -> tuple[CachedSequence, Sequence[int], float] | None:
        """The sequence that gives way next, which chunks of it, and their worth; None: nobody has any."""
        heap = self._heap
        while heap:
            worth, order, sequence = heap[0]
            if sequence.role is not Role.IDLE or not sequence.num_on[self._shelf]:
                heapq.heappop(heap)
                continue
            worth_now = self._worth(sequence)
            if worth_now == worth:
                return sequence, self._policy.frontier(sequence, self._shelf), worth
            heapq.heapreplace(heap, (worth_now, order, sequence))
        return None

    def _worth(self, sequence: CachedSequence) -> float:
        index = self._policy.frontier(sequence, self._shelf)[0]
        return self._policy.worth(sequence, index, self._now_s)


class RetentionPolicy(EvictionPolicy):
    """Leading chunks of long-idle conversations first: `Cost(l) / T` (the paper's section 4.3.1)."""

    name = "retention"

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Costs of chunks of `chunk_tokens`."""
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens
        self._costs_s: list[float] = []  # by chunk index

    def frontier(self, sequence: CachedSequence, shelf: Shelf) -> Sequence[int]:
        """The leading chunk: the cost never decreases towards the tail."""
        return (sequence.first_on(shelf),)

    def worth(self, sequence: CachedSequence, index: int, now_s: float) -> float:
        """Seconds to recompute, over seconds since the conversation was active."""
        costs_s = self._costs_s
        while index >= len(costs_s):
            costs_s.append(self._cost_model.chunk_cost_s((len(costs_s) + 1) * self._chunk_tokens))
        idle_s = now_s - sequence.last_active_s
        return costs_s[index] / (idle_s if idle_s > _MIN_IDLE_S else _MIN_IDLE_S)


class _LeastRecentlyUsed(EvictionPolicy):
    """Oldest activity first, whatever recomputing would cost."""

    def worth(self, sequence: CachedSequence, index: int, now_s: float) -> float:
        """When it was last active."""
        return sequence.last_active_s


class LruPolicy(_LeastRecentlyUsed):
    """Least recently active conversation first, from its leading end: differs by cost alone."""

    name = "lru"

    def frontier(self, sequence: CachedSequence, shelf: Shelf) -> Sequence[int]:
        """The leading chunk."""
        return (sequence.first_on(shelf),)


class ConversationPolicy(_LeastRecentlyUsed):
    """A whole history at once, as CachedAttention does."""

    name = "conversation"

    def frontier(self, sequence: CachedSequence, shelf: Shelf) -> Sequence[int]:
        """All chunks on the shelf."""
        return sequence.indices_on(shelf)


class TrailingPolicy(_LeastRecentlyUsed):
    """Tail first, as caches that match a prefix from token 0 must."""

    name = "trailing"

    def frontier(self, sequence: CachedSequence, shelf: Shelf) -> Sequence[int]:
        """The last chunk."""
        return (sequence.last_on(shelf),)


def make_policy(name: str, cost_model: CostModel, chunk_tokens: int) -> EvictionPolicy:
    """The policy that `CacheConfig.policy` names; `KeyError` for another (the config refuses it first)."""
    policies: dict[str, EvictionPolicy] = {
        RetentionPolicy.name: RetentionPolicy(cost_model, chunk_tokens),
        LruPolicy.name: LruPolicy(),
        ConversationPolicy.name: ConversationPolicy(),
        TrailingPolicy.name: TrailingPolicy(),
    }
    return policies[name]
