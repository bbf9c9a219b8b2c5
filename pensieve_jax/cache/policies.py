"""Whose chunks go first: four orders behind one contract.

Owns: the order of victims among unpinned sequences. A policy sees sequences and the time and yields
victims; it counts nothing, frees nothing and keeps no state between passes.
Called by: `CacheManager`, which drops a group before it asks for the next, and passes over sequences that
were pinned since.

A pass over thousands of conversations drops a few chunks: one number is computed for each of them, and only
those that gave something are looked at again.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from pensieve_jax.cache.cost import CostModel
from pensieve_jax.cache.sequence import CachedSequence

_MIN_IDLE_S = 1e-3  # a conversation that was active just now has a finite value

VictimGroup = tuple[CachedSequence, Sequence[int]]


class EvictionPolicy(ABC):
    """The order in which unpinned chunks are dropped."""

    name: str

    def victims(self, sequences: Sequence[CachedSequence], now_s: float) -> Iterator[VictimGroup]:
        """Groups of chunks to drop together, lowest worth first, until nothing is resident.

        One frontier a sequence: `frontier` says what goes next of it, and sequences interleave by `worth`.
        Ties fall to the sequence that was given first. The caller drops each group before it goes on; a
        sequence whose group is still there when the iterator is resumed is passed over.
        """
        worth = self.worth
        heap = [(worth(s, now_s), order, s) for order, s in enumerate(sequences) if s.num_resident]
        heapq.heapify(heap)
        while heap:
            _, order, sequence = heap[0]
            num_resident = sequence.num_resident
            if num_resident:
                yield sequence, self.frontier(sequence)
            if 0 < sequence.num_resident < num_resident:
                heapq.heapreplace(heap, (worth(sequence, now_s), order, sequence))
            else:
                heapq.heappop(heap)

    @abstractmethod
    def frontier(self, sequence: CachedSequence) -> Sequence[int]:
        """The chunks of a sequence that go next, together; it has at least one resident."""

    @abstractmethod
    def worth(self, sequence: CachedSequence, now_s: float) -> float:
        """What keeping the frontier of a sequence is worth; the lowest goes first."""


class RetentionPolicy(EvictionPolicy):
    """Leading chunks of long-idle conversations first: `Cost(l) / T` (the paper's section 4.3.1)."""

    name = "retention"

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Costs of chunks of `chunk_tokens`."""
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens
        self._costs_s: list[float] = []  # by chunk index

    def frontier(self, sequence: CachedSequence) -> Sequence[int]:
        """The leading chunk: the cost never decreases towards the tail."""
        return (sequence.first_resident,)

    def worth(self, sequence: CachedSequence, now_s: float) -> float:
        """Seconds to recompute, over seconds since the conversation was active."""
        index, costs_s = sequence.first_resident, self._costs_s
        while index >= len(costs_s):
            costs_s.append(self._cost_model.chunk_cost_s((len(costs_s) + 1) * self._chunk_tokens))
        idle_s = now_s - sequence.last_active_s
        return costs_s[index] / (idle_s if idle_s > _MIN_IDLE_S else _MIN_IDLE_S)


class _LeastRecentlyUsed(EvictionPolicy):
    """Oldest activity first, whatever recomputing would cost."""

    def worth(self, sequence: CachedSequence, now_s: float) -> float:
        """When the conversation was last active, in seconds."""
        return sequence.last_active_s


class LruPolicy(_LeastRecentlyUsed):
    """By chunk, ties from the leading end: differs from `retention` by the cost alone."""

    name = "lru"

    def frontier(self, sequence: CachedSequence) -> Sequence[int]:
        """The leading chunk."""
        return (sequence.first_resident,)


class ConversationPolicy(_LeastRecentlyUsed):
    """A whole history at once, as CachedAttention does."""

    name = "conversation"

    def frontier(self, sequence: CachedSequence) -> Sequence[int]:
        """All resident chunks."""
        return sequence.resident_indices()


class TrailingPolicy(_LeastRecentlyUsed):
    """Tail first, as caches that match a prefix from token 0 must."""

    name = "trailing"

    def frontier(self, sequence: CachedSequence) -> Sequence[int]:
        """The last chunk; an unpinned sequence's last chunk is never dropped."""
        return (len(sequence.chunks) - 1,)


def make_policy(name: str, cost_model: CostModel, chunk_tokens: int) -> EvictionPolicy:
    """The policy that `CacheConfig.policy` names; `KeyError` for another (the config refuses it first)."""
    policies: dict[str, EvictionPolicy] = {
        RetentionPolicy.name: RetentionPolicy(cost_model, chunk_tokens),
        LruPolicy.name: LruPolicy(),
        ConversationPolicy.name: ConversationPolicy(),
        TrailingPolicy.name: TrailingPolicy(),
    }
    return policies[name]
