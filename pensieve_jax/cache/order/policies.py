"""Whose chunks go first: five orders behind one contract.

Owns: the order of victims among idle sequences. A policy sees sequences, a shelf and the time; it counts
nothing and frees nothing. What the order `learned` goes by is told to it between passes (`learning`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pensieve_jax.cache.order.cost import CostModel
from pensieve_jax.cache.order.returns import ENDS_S, Array, Integers, ReturnModel, bin_of, bins_of
from pensieve_jax.cache.sequence import Role
from pensieve_jax.cache.states import EvictionClass

_MIN_IDLE_S = 1e-3  # a conversation that was active just now has a finite value


type DatedWorth = tuple[float, float]
"""What a chunk was worth, and when that was asked, in seconds of the cache's clock."""


class Activity(Protocol):
    """What the worth of a conversation's chunks follows from.

    Attributes:
      last_active_s: when its latest turn was sent or ended.
      bucket: which turns its latest one was like (`returns.bucket_of`).
    """

    @property
    def last_active_s(self) -> float: ...

    @property
    def bucket(self) -> int: ...


class Candidate(Activity, Protocol):
    """What an order may ask of a conversation; a `CachedSequence` answers, and so do shadows of one.

    Attributes:
      role, role_number: only idle ones give way; the number tells who became so first.
      num_on: own chunks, by shelf.
    """

    role: Role
    role_number: int
    num_on: list[int]

    def first_on(self, shelf: EvictionClass) -> int:
        """The leading own chunk on a shelf."""
        ...

    def last_on(self, shelf: EvictionClass) -> int:
        """The last own chunk on a shelf."""
        ...

    def indices_on(self, shelf: EvictionClass) -> Sequence[int]:
        """Own chunks on a shelf, leading first."""
        ...


class EvictionCandidates(NamedTuple):
    """What many conversations would give up next, as columns of one length.

    Attributes:
      last_active_s, buckets: f64 and i64, as `Activity` has them.
      chunks: i64, the index that each would give up first; below 0 for nobody's, whose worth does not matter.
    """

    last_active_s: Array
    buckets: Integers
    chunks: Integers


class EvictionPolicy(ABC):
    """The order in which idle chunks leave a shelf: one frontier a sequence, the lowest worth first.

    Attributes:
      name: as `CacheConfig.policy` names it.
    """

    name: str

    @property
    def in_force(self) -> EvictionPolicy:
        """The order that decides now: itself, where it is not one among several, which share `chunk`."""
        return self

    @abstractmethod
    def chunk(self, sequence: Candidate, shelf: EvictionClass) -> int:
        """The chunk of a sequence that leaves the shelf next; there is at least one on it."""

    def frontier(self, sequence: Candidate, shelf: EvictionClass, chunk: int) -> Sequence[int]:
        """The chunks that leave together with `chunk`, that one first."""
        return (chunk,)

    @abstractmethod
    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """What keeping chunk `index` is worth; comparable across sequences and shelves.

        It depends on these, on when the sequence was active and what its turn was like, and on nothing else.
        While a sequence gives chunks up, it may only rise from one to the next.
        """

    def worths(self, offers: EvictionCandidates, now_s: float) -> Array:
        """`worth` of many: f64, equal to the last bit. In numpy it takes a hundredth of the time."""
        columns = (column.tolist() for column in offers)
        worths = [
            math.inf if chunk < 0 else self.worth(_Active(last_active_s, bucket), chunk, now_s)
            for last_active_s, bucket, chunk in zip(*columns, strict=True)
        ]
        return np.array(worths, np.float64)

    def epoch(self, now_s: float) -> Hashable:
        """Worths at two times of one epoch are the same; by itself every time is one of its own."""
        return now_s

    def until_s(self, offers: EvictionCandidates, now_s: float) -> Array | None:
        """When the worth of each changes nevertheless, within the epoch: f64; None: it does not."""
        return None

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """These worths in words, for people who ask why chunks were dropped."""
        return f"worth {_range([worth for worth, _ in worths], '.3g')}"


class _Active(NamedTuple):
    """The least that has an activity."""

    last_active_s: float
    bucket: int


class _Costs(dict[int, float]):
    """Seconds to recompute a chunk, by its index; never less than of the one before."""

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Of chunks of `chunk_tokens`."""
        super().__init__()
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens
        self._first: Array = np.zeros(0)  # of the first so many chunks

    def __missing__(self, index: int) -> float:
        """Of a chunk that nobody has asked about."""
        cost_s = self[index] = self._cost_model.chunk_cost_s((index + 1) * self._chunk_tokens)
        return cost_s

    def of_all(self, indices: Integers) -> Array:
        """Of many chunks; anything where an index is below 0."""
        try:
            return self._first.take(indices)
        except IndexError:
            size = 2 * int(np.abs(indices).max()) + 1
            self._first = np.array([self[index] for index in range(size)])
            return self._first.take(indices)


class _LeadingFirst(EvictionPolicy):
    """Within a conversation the leading chunk: the cost never decreases towards the tail."""

    def chunk(self, sequence: Candidate, shelf: EvictionClass) -> int:
        return sequence.first_on(shelf)


class RetentionPolicy(_LeadingFirst):
    """Leading chunks of long-idle conversations first: `Cost(l) / T` (the paper's section 4.3.1)."""

    name = "retention"

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Costs of chunks of `chunk_tokens`."""
        self._costs_s = _Costs(cost_model, chunk_tokens)

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Seconds to recompute, over seconds since the conversation was active."""
        idle_s = now_s - sequence.last_active_s
        return self._costs_s[index] / (idle_s if idle_s > _MIN_IDLE_S else _MIN_IDLE_S)

    def worths(self, offers: EvictionCandidates, now_s: float) -> Array:
        worths: Array = self._costs_s.of_all(offers.chunks) / _idle_s(offers, now_s)
        return worths

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """As the quotients that they are."""
        return f"{super().describe(worths)} s of recomputation per second idle"


class _LeastRecentlyUsed(EvictionPolicy):
    """Oldest activity first, whatever recomputing would cost."""

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """When it was last active."""
        return sequence.last_active_s

    def worths(self, offers: EvictionCandidates, now_s: float) -> Array:
        return offers.last_active_s

    def epoch(self, now_s: float) -> Hashable:
        """Always the same one."""
        return None

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """By how long ago that was."""
        return f"idle for {_range([at_s - active_s for active_s, at_s in worths], '.1f')} s"


class LruPolicy(_LeadingFirst, _LeastRecentlyUsed):
    """Least recently active conversation first, from its leading end: differs by cost alone."""

    name = "lru"


class ReturnsPolicy(_LeadingFirst):
    """By how likely a conversation returns while it is held: index of returns * `Cost(l)`.

    The index stands still while a conversation is in one bin of idle time, from fit to fit.
    """

    name = "returns"

    def __init__(self, model: ReturnModel, cost_model: CostModel, chunk_tokens: int) -> None:
        """`model` changes between passes."""
        self.model = model
        self._num_models = 1
        self._costs_s = _Costs(cost_model, chunk_tokens)

    def use(self, model: ReturnModel) -> None:
        """Go by another model from the next decision on."""
        self.model = model
        self._num_models += 1

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Seconds of recomputation that are saved, per second of being held."""
        bin_number = bin_of(sequence.last_active_s, now_s)
        return self.model.index(sequence.bucket, bin_number) * self._costs_s[index]

    def worths(self, offers: EvictionCandidates, now_s: float) -> Array:
        indices = self.model.indices(offers.buckets, bins_of(offers.last_active_s, now_s))
        worths: Array = indices * self._costs_s.of_all(offers.chunks)
        return worths

    def epoch(self, now_s: float) -> Hashable:
        """From fit to fit."""
        return self._num_models, self.model.num_fits

    def until_s(self, offers: EvictionCandidates, now_s: float) -> Array:
        """Idle time leaves its bin then."""
        ends: Array = offers.last_active_s + ENDS_S.take(bins_of(offers.last_active_s, now_s))
        return ends


class RecencyPolicy(LruPolicy):
    """The order of `lru`, with worths above 0 that fall with idle time, as those of other orders do."""

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """One over seconds since the conversation was active."""
        idle_s = now_s - sequence.last_active_s
        return 1.0 / (idle_s if idle_s > _MIN_IDLE_S else _MIN_IDLE_S)

    def worths(self, offers: EvictionCandidates, now_s: float) -> Array:
        worths: Array = 1.0 / _idle_s(offers, now_s)
        return worths

    def epoch(self, now_s: float) -> Hashable:
        """These fall all the time."""
        return now_s

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """As the numbers that they are: none is a time."""
        return EvictionPolicy.describe(self, worths)


ORDERS = (RetentionPolicy.name, RecencyPolicy.name, ReturnsPolicy.name)
"""What `LearnedPolicy` chooses from; the first one where nothing was learned."""


def orders_of(
    by_returns: ReturnsPolicy, cost_model: CostModel, chunk_tokens: int
) -> dict[str, EvictionPolicy]:
    """`ORDERS` by name, for chunks of `chunk_tokens`."""
    return dict(
        zip(ORDERS, (RetentionPolicy(cost_model, chunk_tokens), RecencyPolicy(), by_returns), strict=True)
    )


class LearnedPolicy(_LeadingFirst):
    """What `policy_selector` found to be the best of three orders: the paper's, LRU's, and that of returns.

    Attributes:
      orders: by name; all give way from the leading end.
      followed: the name of the one that is followed.
    """

    name = "learned"

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Nothing learned: the paper's order."""
        self._returns = ReturnsPolicy(ReturnModel(), cost_model, chunk_tokens)
        self.orders = orders_of(self._returns, cost_model, chunk_tokens)
        self.followed = ORDERS[0]

    @property
    def in_force(self) -> EvictionPolicy:
        """The order that is followed."""
        return self.orders[self.followed]

    @property
    def model(self) -> ReturnModel:
        return self._returns.model

    def use(self, model: ReturnModel) -> None:
        """Go by another model from the next decision on."""
        self._returns.use(model)

    def follow(self, name: str) -> None:
        """Go by another order from the next decision on."""
        self.followed = name

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """As the order that is followed has it."""
        return self.in_force.worth(sequence, index, now_s)

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """By the numbers: another order may have been followed then."""
        return f"{super().describe(worths)} in the order that was followed"


class ConversationPolicy(_LeadingFirst, _LeastRecentlyUsed):
    """A whole history at once, as CachedAttention does."""

    name = "conversation"

    def frontier(self, sequence: Candidate, shelf: EvictionClass, chunk: int) -> Sequence[int]:
        """All chunks on the shelf."""
        return tuple(sequence.indices_on(shelf))


class TrailingPolicy(_LeastRecentlyUsed):
    """Tail first, as caches that match a prefix from token 0 must."""

    name = "trailing"

    def chunk(self, sequence: Candidate, shelf: EvictionClass) -> int:
        return sequence.last_on(shelf)


def _idle_s(offers: EvictionCandidates, now_s: float) -> Array:
    """Since when they are idle, as the orders divide by it."""
    idle_s: Array = np.maximum(now_s - offers.last_active_s, _MIN_IDLE_S)
    return idle_s


def _range(values: Sequence[float], form: str) -> str:
    """The lowest and the highest, or one of them where they read the same."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def make_policy(name: str, cost_model: CostModel, chunk_tokens: int) -> EvictionPolicy:
    """The policy that `CacheConfig.policy` names; `KeyError` for another (the config refuses it first)."""
    policies: dict[str, Callable[[], EvictionPolicy]] = {
        RetentionPolicy.name: lambda: RetentionPolicy(cost_model, chunk_tokens),
        LruPolicy.name: LruPolicy,
        ConversationPolicy.name: ConversationPolicy,
        TrailingPolicy.name: TrailingPolicy,
        LearnedPolicy.name: lambda: LearnedPolicy(cost_model, chunk_tokens),
    }
    return policies[name]()
