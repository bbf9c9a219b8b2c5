"""Whose chunks go first: four orders behind one contract.

Owns: the order of victims among idle sequences. A policy sees sequences, a shelf and the time; it counts
nothing, frees nothing and keeps no state between passes.
Called by: `Evictor`, through a `VictimOrder` for each shelf that it needs room on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pensieve_jax.cache.cost import CostModel
from pensieve_jax.cache.sequence import CachedSequence
from pensieve_jax.cache.states import Shelf

_MIN_IDLE_S = 1e-3  # a conversation that was active just now has a finite value


type DatedWorth = tuple[float, float]
"""What a chunk was worth, and when that was asked, in seconds of the cache's clock."""


class EvictionPolicy(ABC):
    """The order in which idle chunks leave a shelf: one frontier a sequence, the lowest worth first."""

    name: str

    @abstractmethod
    def frontier(self, sequence: CachedSequence, shelf: Shelf) -> Sequence[int]:
        """The chunks of a sequence that leave the shelf next, together; there is at least one on it."""

    @abstractmethod
    def worth(self, sequence: CachedSequence, index: int, now_s: float) -> float:
        """What keeping chunk `index` is worth; comparable across sequences and shelves."""

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """These worths in words, for people who ask why chunks were dropped."""
        return f"worth {_range([worth for worth, _ in worths], '.3g')}"

    @abstractmethod
    def group(self, sequence: CachedSequence, shelf: Shelf) -> int:
        """Sequences of one group are worth less the earlier they were active, whatever the time is.

        The group serves as the index of the frontier's first chunk where `worth` asks for one. It may grow
        by itself, and only falls when a chunk comes to the shelf.
        """


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

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """As the quotients that they are."""
        return f"{super().describe(worths)} s of recomputation per second idle"

    def group(self, sequence: CachedSequence, shelf: Shelf) -> int:
        """Those that would give the same chunk, which costs them the same."""
        return sequence.first_on(shelf)


class _LeastRecentlyUsed(EvictionPolicy):
    """Oldest activity first, whatever recomputing would cost."""

    def worth(self, sequence: CachedSequence, index: int, now_s: float) -> float:
        """When it was last active."""
        return sequence.last_active_s

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """By how long ago that was."""
        return f"idle for {_range([at_s - active_s for active_s, at_s in worths], '.1f')} s"

    def group(self, sequence: CachedSequence, shelf: Shelf) -> int:
        """All of them."""
        return 0


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


def _range(values: Sequence[float], form: str) -> str:
    """The lowest and the highest, or one of them where they read the same."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def make_policy(name: str, cost_model: CostModel, chunk_tokens: int) -> EvictionPolicy:
    """The policy that `CacheConfig.policy` names; `KeyError` for another (the config refuses it first)."""
    policies: dict[str, EvictionPolicy] = {
        RetentionPolicy.name: RetentionPolicy(cost_model, chunk_tokens),
        LruPolicy.name: LruPolicy(),
        ConversationPolicy.name: ConversationPolicy(),
        TrailingPolicy.name: TrailingPolicy(),
    }
    return policies[name]
