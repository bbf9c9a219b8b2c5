"""Whose chunks go first: four orders behind one contract.

Owns: the order of victims among unpinned sequences. A policy sees sequences and the time and yields
victims; it counts nothing, frees nothing and keeps no state, so one iterator serves a whole step.
Called by: `CacheManager`, which skips victims that were pinned since.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from pensieve_jax.cache.cost import CostModel
from pensieve_jax.cache.sequence import CachedSequence

_MIN_IDLE_S = 1e-3  # a conversation that was active just now has a finite value

VictimGroup = tuple[CachedSequence, Sequence[int]]


class EvictionPolicy(ABC):
    """The order in which unpinned chunks are dropped."""

    name: str

    def victims(self, sequences: Iterable[CachedSequence], now_s: float) -> Iterator[VictimGroup]:
        """Groups of chunks to drop together, lowest worth first; every resident chunk once.

        One frontier a sequence: its groups come in `groups` order, and sequences interleave by `worth` of
        the group at their frontier. Ties fall to the sequence that was given first.
        """
        frontier = []
        for order, sequence in enumerate(sequences):
            groups = self.groups(sequence)
            group = next(groups, None)
            if group is not None:
                frontier.append((self.worth(sequence, group, now_s), order, sequence, group, groups))
        heapq.heapify(frontier)
        while frontier:
            _, order, sequence, group, groups = frontier[0]
            yield sequence, group
            following = next(groups, None)
            if following is None:
                heapq.heappop(frontier)
            else:
                worth = self.worth(sequence, following, now_s)
                heapq.heapreplace(frontier, (worth, order, sequence, following, groups))

    @abstractmethod
    def groups(self, sequence: CachedSequence) -> Iterator[Sequence[int]]:
        """The sequence's resident chunks, in the order and the groups in which they go.

        Lazy, because a step drops a few chunks and there are thousands; chunks may be dropped while the
        iterator waits.
        """

    @abstractmethod
    def worth(self, sequence: CachedSequence, group: Sequence[int], now_s: float) -> float:
        """What keeping this group is worth; the lowest goes first."""


class RetentionPolicy(EvictionPolicy):
    """Leading chunks of long-idle conversations first: `Cost(l) / T` (the paper's section 4.3.1)."""

    name = "retention"

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Costs of chunks of `chunk_tokens`."""
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens

    def groups(self, sequence: CachedSequence) -> Iterator[Sequence[int]]:
        """One chunk at a time, leading first: the cost never decreases towards the tail."""
        return ((i,) for i in sequence.resident_indices())

    def worth(self, sequence: CachedSequence, group: Sequence[int], now_s: float) -> float:
        """Seconds to recompute, over seconds since the conversation was active."""
        idle_s = max(now_s - sequence.last_active_s, _MIN_IDLE_S)
        return self._cost_model.chunk_cost_s((group[0] + 1) * self._chunk_tokens) / idle_s


class _LeastRecentlyUsed(EvictionPolicy):
    """Oldest activity first, whatever recomputing would cost."""

    def worth(self, sequence: CachedSequence, group: Sequence[int], now_s: float) -> float:
        """When the conversation was last active, in seconds."""
        return sequence.last_active_s


class LruPolicy(_LeastRecentlyUsed):
    """By chunk, ties from the leading end: differs from `retention` by the cost alone."""

    name = "lru"

    def groups(self, sequence: CachedSequence) -> Iterator[Sequence[int]]:
        """One chunk at a time, leading first."""
        return ((i,) for i in sequence.resident_indices())


class ConversationPolicy(_LeastRecentlyUsed):
    """A whole history at once, as CachedAttention does."""

    name = "conversation"

    def groups(self, sequence: CachedSequence) -> Iterator[Sequence[int]]:
        """All resident chunks in one group."""
        if sequence.num_resident:
            yield tuple(sequence.resident_indices())


class TrailingPolicy(_LeastRecentlyUsed):
    """Tail first, as caches that match a prefix from token 0 must."""

    name = "trailing"

    def groups(self, sequence: CachedSequence) -> Iterator[Sequence[int]]:
        """One chunk at a time, the last first."""
        return ((i,) for i in sequence.resident_indices(trailing=True))


def make_policy(name: str, cost_model: CostModel, chunk_tokens: int) -> EvictionPolicy:
    """The policy that `CacheConfig.policy` names; `KeyError` for another (the config refuses it first)."""
    policies: dict[str, EvictionPolicy] = {
        RetentionPolicy.name: RetentionPolicy(cost_model, chunk_tokens),
        LruPolicy.name: LruPolicy(),
        ConversationPolicy.name: ConversationPolicy(),
        TrailingPolicy.name: TrailingPolicy(),
    }
    return policies[name]
