"""Five eviction policies behind one interface.

Owns: the order of victims among idle sequences. A policy is a function of sequences, an eviction class and
the time.
Does not know: pages or slots; it frees nothing. `learning` updates the order `learned` between passes.
Called by `VictimOrder`, `Evictor` and `CacheManager`.
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

_MIN_IDLE_S = 1e-3  # keeps the value of a conversation that was just active finite


type DatedWorth = tuple[float, float]
"""A chunk's retention value and the time of its evaluation, in seconds of the cache's clock."""


class Activity(Protocol):
    """The properties of a conversation that determine the retention values of its chunks.

    Attributes:
      last_active_s: when its latest turn was sent or ended.
      bucket: bucket of its latest turn (`returns.bucket_of`).
    """

    @property
    def last_active_s(self) -> float: ...

    @property
    def bucket(self) -> int: ...


class Candidate(Activity, Protocol):
    """The interface of a conversation to an order: a `CachedSequence` or a `GhostEntry`.

    Attributes:
      role, role_number: only idle conversations are evicted; the number tells which became idle first.
      num_by_class: number of own chunks by eviction class.
    """

    role: Role
    role_number: int
    num_by_class: list[int]

    def first_of(self, eviction_class: EvictionClass) -> int:
        """Return the first own chunk of a class."""
        ...

    def last_of(self, eviction_class: EvictionClass) -> int:
        """Return the last own chunk of a class."""
        ...

    def indices_of(self, eviction_class: EvictionClass) -> Sequence[int]:
        """Return the own chunks of a class, ascending."""
        ...


class EvictionCandidates(NamedTuple):
    """The next eviction candidate of many conversations, as columns of one length.

    Attributes:
      last_active_s, buckets: f64 and i64, as in `Activity`.
      chunks: i64, the index of the chunk that each would give up first; below 0 for unused rows, whose
        values do not matter.
    """

    last_active_s: Array
    buckets: Integers
    chunks: Integers


class EvictionPolicy(ABC):
    """The eviction order of idle chunks of one class: one frontier per sequence, lowest worth first.

    The worth is the paper's retention value, or the value by which another order replaces it.

    Attributes:
      name: its name in `CacheConfig.policy`.
    """

    name: str

    @property
    def current(self) -> EvictionPolicy:
        """The order in use: itself, except for a policy that selects among orders with the same `chunk`."""
        return self

    @abstractmethod
    def chunk(self, sequence: Candidate, eviction_class: EvictionClass) -> int:
        """Return the chunk that a sequence gives up next; it must have a chunk of this class."""

    def frontier(self, sequence: Candidate, eviction_class: EvictionClass, chunk: int) -> Sequence[int]:
        """Return the chunks that are evicted together with `chunk`, that one first."""
        return (chunk,)

    @abstractmethod
    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Return the value of keeping chunk `index`; comparable across sequences and eviction classes.

        It is a function of the arguments and the attributes of `Activity` only. From one chunk that a
        sequence gives up to the next, it must not decrease.
        """

    def worths(self, candidates: EvictionCandidates, now_s: float) -> Array:
        """Return `worth` for many candidates: f64, bit-identical. Overrides in numpy take 1% of the time."""
        columns = (column.tolist() for column in candidates)
        worths = [
            math.inf if chunk < 0 else self.worth(_Active(last_active_s, bucket), chunk, now_s)
            for last_active_s, bucket, chunk in zip(*columns, strict=True)
        ]
        return np.array(worths, np.float64)

    def epoch(self, now_s: float) -> Hashable:
        """Return a key of the time; values are equal at times of equal keys. Default: every time differs."""
        return now_s

    def until_s(self, candidates: EvictionCandidates, now_s: float) -> Array | None:
        """Return when each value changes within the epoch after all (f64), or None if none does."""
        return None

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """Describe these values for a user who asks why chunks were dropped."""
        return f"worth {_range([worth for worth, _ in worths], '.3g')}"


class _Active(NamedTuple):
    """A minimal `Activity`, for the evaluation of one candidate."""

    last_active_s: float
    bucket: int


class _Costs(dict[int, float]):
    """Cached seconds to recompute a chunk, by its index; non-decreasing in the index."""

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        super().__init__()
        self._cost_model = cost_model
        self._chunk_tokens = chunk_tokens
        self._first: Array = np.zeros(0)  # costs of the first chunks, grown on demand

    def __missing__(self, index: int) -> float:
        """Compute the cost of a chunk at its first use."""
        cost_s = self[index] = self._cost_model.chunk_cost_s((index + 1) * self._chunk_tokens)
        return cost_s

    def of_all(self, indices: Integers) -> Array:
        """Return the costs of many chunks; undefined where an index is below 0."""
        try:
            return self._first.take(indices)
        except IndexError:
            size = 2 * int(np.abs(indices).max()) + 1
            self._first = np.array([self[index] for index in range(size)])
            return self._first.take(indices)


class _LeadingFirst(EvictionPolicy):
    """An order that evicts leading chunks first, because cost never decreases towards the tail."""

    def chunk(self, sequence: Candidate, eviction_class: EvictionClass) -> int:
        return sequence.first_of(eviction_class)


class RetentionPolicy(_LeadingFirst):
    """The paper's retention value `Cost(l) / T` (section 4.3.1): long-idle, leading chunks go first."""

    name = "retention"

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Take costs from `cost_model`, for chunks of `chunk_tokens`."""
        self._costs_s = _Costs(cost_model, chunk_tokens)

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Return seconds to recompute the chunk / seconds since the conversation was active."""
        idle_s = now_s - sequence.last_active_s
        return self._costs_s[index] / (idle_s if idle_s > _MIN_IDLE_S else _MIN_IDLE_S)

    def worths(self, candidates: EvictionCandidates, now_s: float) -> Array:
        worths: Array = self._costs_s.of_all(candidates.chunks) / _idle_s(candidates, now_s)
        return worths

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """Describe the values with their unit."""
        return f"{super().describe(worths)} s of recomputation per second idle"


class _LeastRecentlyUsed(EvictionPolicy):
    """An order by last activity that ignores the cost of recomputation."""

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Return the time of its last activity."""
        return sequence.last_active_s

    def worths(self, candidates: EvictionCandidates, now_s: float) -> Array:
        return candidates.last_active_s

    def epoch(self, now_s: float) -> Hashable:
        """Return None: the values do not depend on the time."""
        return None

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """Describe the values as idle times."""
        return f"idle for {_range([at_s - active_s for active_s, at_s in worths], '.1f')} s"


class LruPolicy(_LeadingFirst, _LeastRecentlyUsed):
    """The least recently active conversation first, leading chunks first.

    It differs from `retention` only in that it ignores the cost.
    """

    name = "lru"


class ReturnsPolicy(_LeadingFirst):
    """An order by index of returns * `Cost(l)`: recomputation saved by expected returns.

    The index is constant within one bin of idle time and between fits of the model.
    """

    name = "returns"

    def __init__(self, model: ReturnModel, cost_model: CostModel, chunk_tokens: int) -> None:
        """Use `model`, which may be fitted again between passes."""
        self.model = model
        self._num_models = 1
        self._costs_s = _Costs(cost_model, chunk_tokens)

    def use(self, model: ReturnModel) -> None:
        """Use another model from the next decision on."""
        self.model = model
        self._num_models += 1

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Return the expected seconds of recomputation saved per second that the chunk is kept."""
        bin_number = bin_of(sequence.last_active_s, now_s)
        return self.model.index(sequence.bucket, bin_number) * self._costs_s[index]

    def worths(self, candidates: EvictionCandidates, now_s: float) -> Array:
        indices = self.model.indices(candidates.buckets, bins_of(candidates.last_active_s, now_s))
        worths: Array = indices * self._costs_s.of_all(candidates.chunks)
        return worths

    def epoch(self, now_s: float) -> Hashable:
        """Return the number of the current fit."""
        return self._num_models, self.model.num_fits

    def until_s(self, candidates: EvictionCandidates, now_s: float) -> Array:
        """Return when each conversation's idle time leaves its bin."""
        ends: Array = candidates.last_active_s + ENDS_S.take(bins_of(candidates.last_active_s, now_s))
        return ends


class RecencyPolicy(LruPolicy):
    """The order of `lru`, with positive values that decay with idle time like those of other orders."""

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Return 1 / seconds since the conversation was active."""
        idle_s = now_s - sequence.last_active_s
        return 1.0 / (idle_s if idle_s > _MIN_IDLE_S else _MIN_IDLE_S)

    def worths(self, candidates: EvictionCandidates, now_s: float) -> Array:
        worths: Array = 1.0 / _idle_s(candidates, now_s)
        return worths

    def epoch(self, now_s: float) -> Hashable:
        """Return `now_s`: the values decay continuously, so each time is its own epoch."""
        return now_s

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """Describe the values as plain numbers; unlike those of `lru` they are not times."""
        return EvictionPolicy.describe(self, worths)


ORDERS = (RetentionPolicy.name, RecencyPolicy.name, ReturnsPolicy.name)
"""The orders that `LearnedPolicy` selects from; the first is the default before anything was learned."""


def orders_of(
    by_returns: ReturnsPolicy, cost_model: CostModel, chunk_tokens: int
) -> dict[str, EvictionPolicy]:
    """Return `ORDERS` by name, for chunks of `chunk_tokens`."""
    return dict(
        zip(ORDERS, (RetentionPolicy(cost_model, chunk_tokens), RecencyPolicy(), by_returns), strict=True)
    )


class LearnedPolicy(_LeadingFirst):
    """The best of three orders according to `policy_selector`: the paper's, LRU, and `returns`.

    Attributes:
      orders: orders by name; all evict leading chunks first.
      followed: name of the order in use.
    """

    name = "learned"

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Start with the paper's order, before anything was learned."""
        self._returns = ReturnsPolicy(ReturnModel(), cost_model, chunk_tokens)
        self.orders = orders_of(self._returns, cost_model, chunk_tokens)
        self.selected = ORDERS[0]

    @property
    def current(self) -> EvictionPolicy:
        """Order that is currently in use."""
        return self.orders[self.selected]

    @property
    def model(self) -> ReturnModel:
        return self._returns.model

    def use(self, model: ReturnModel) -> None:
        """Use another model from the next decision on."""
        self._returns.use(model)

    def select(self, name: str) -> None:
        """Use another order from the next decision on."""
        self.selected = name

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Return the value under the order in use."""
        return self.current.worth(sequence, index, now_s)

    def describe(self, worths: Sequence[DatedWorth]) -> str:
        """Describe the values without a unit, since another order may have been in use at the time."""
        return f"{super().describe(worths)} in the order that was followed"


class ConversationPolicy(_LeadingFirst, _LeastRecentlyUsed):
    """An order that evicts the whole history of a conversation at once, as CachedAttention does."""

    name = "conversation"

    def frontier(self, sequence: Candidate, eviction_class: EvictionClass, chunk: int) -> Sequence[int]:
        """Return all chunks of the class."""
        return tuple(sequence.indices_of(eviction_class))


class TrailingPolicy(_LeastRecentlyUsed):
    """An order that evicts the tail first, as required by caches that match a prefix from token 0."""

    name = "trailing"

    def chunk(self, sequence: Candidate, eviction_class: EvictionClass) -> int:
        return sequence.last_of(eviction_class)


def _idle_s(candidates: EvictionCandidates, now_s: float) -> Array:
    """Return the idle times, at least `_MIN_IDLE_S`, because orders divide by them."""
    idle_s: Array = np.maximum(now_s - candidates.last_active_s, _MIN_IDLE_S)
    return idle_s


def _range(values: Sequence[float], form: str) -> str:
    """Format the lowest and the highest value, or one of them if both format alike."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def make_policy(name: str, cost_model: CostModel, chunk_tokens: int) -> EvictionPolicy:
    """Make the policy named by `CacheConfig.policy`; KeyError for other names, which the config rejects."""
    policies: dict[str, Callable[[], EvictionPolicy]] = {
        RetentionPolicy.name: lambda: RetentionPolicy(cost_model, chunk_tokens),
        LruPolicy.name: LruPolicy,
        ConversationPolicy.name: ConversationPolicy,
        TrailingPolicy.name: TrailingPolicy,
        LearnedPolicy.name: lambda: LearnedPolicy(cost_model, chunk_tokens),
    }
    return policies[name]()
