"""A model of when conversations return, from observed returns and from censored observations.

Owns: the grouping of similar turns (buckets), the rate of return by bucket and bin of idle time, and the
index computed from it.
Does not know: chunks, costs, which conversations are idle now (`return_log`), or the use of the index
(`policies`).
Called by `return_log`, `policies` and `learning`.

The estimate is that of survival analysis: returns in a bin of idle time, over the time that all conversations
spent in it, including those that have not returned. It is shrunk twice: a bucket towards all turns of its
bin, and a bin towards `r / idle time`, which the paper's order assumes (section 4.3.1). So without evidence
the order is the paper's, in steps of a bin's width, and idle times beyond all observed ones get a low index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

type Array = NDArray[np.float64]
type Integers = NDArray[np.int64]

# A bucket groups turns that are all first or all later turns, with similar prompt and output lengths. These
# features were chosen on half of the sessions of public traces (lab/docs/learned_order.md).
_PROMPT_TOKENS = (100, 400, 1500, 5000, 12000)
_OUTPUT_TOKENS = (250,)
_NUM_SIZES = (len(_PROMPT_TOKENS) + 1) * (len(_OUTPUT_TOKENS) + 1)
UNKNOWN = 0
"""Bucket of conversations without an observed turn."""
NUM_BUCKETS = 1 + 2 * _NUM_SIZES

# Bin i of idle time is [EDGES_S[i], EDGES_S[i + 1]), in seconds; the last bin is unbounded.
EDGES_S: tuple[float, ...] = (0.0, *np.geomspace(1.0, 20_000.0, 28)[:-1].tolist())
NUM_BINS = len(EDGES_S)
ENDS_S: Array = np.array([*EDGES_S[1:], np.inf])
HORIZON_S = 20_000.0
"""Longest observed idle time; a conversation idle for longer counts as not returning."""

_BUCKET_WEIGHT, _BIN_WEIGHT = 0.7, 3.0  # weights of the priors of the shrinkage, in returns
_MAX_NUM_RETURNS = 50_000.0  # at this number all counts are halved, because usage changes over time
_FIRST_RATE = 0.1  # r before any observation; it scales every index equally

_WIDTHS_S: Array = np.diff([*EDGES_S, HORIZON_S])
_LEFT_S: Array = np.array(EDGES_S)
_MIDDLES_S: Array = np.maximum(np.sqrt(np.maximum(_LEFT_S, 0.5) * np.array([*EDGES_S[1:], HORIZON_S])), 0.5)


def bucket_of(*, is_first: bool, prompt_tokens: int, output_tokens: int) -> int:
    """Return the bucket of a turn, from its own tokens without history."""
    sizes = bisect_right(_PROMPT_TOKENS, prompt_tokens) * (len(_OUTPUT_TOKENS) + 1)
    sizes += bisect_right(_OUTPUT_TOKENS, output_tokens)
    return 1 + (not is_first) * _NUM_SIZES + sizes


def bin_of(last_active_s: float, now_s: float) -> int:
    """Return the bin of idle time; it begins at exactly `last_active_s + EDGES_S[bin]`."""
    found = bisect_right(EDGES_S, now_s - last_active_s) - 1
    # The difference may be rounded across an edge. The sum decides, as in `ReturnsPolicy.until_s`.
    if found + 1 < NUM_BINS and last_active_s + EDGES_S[found + 1] <= now_s:
        return found + 1
    if found > 0 and last_active_s + EDGES_S[found] > now_s:
        return found - 1
    return max(found, 0)


def bins_of(last_active_s: Array, now_s: float) -> Integers:
    """Return `bin_of` for each element of `last_active_s`, as an array of its shape."""
    found = np.maximum(_LEFT_S.searchsorted(now_s - last_active_s, "right") - 1, 0)
    found += last_active_s + ENDS_S.take(found) <= now_s
    found -= (found > 0) & (last_active_s + _LEFT_S.take(found) > now_s)
    return found


class ReturnModel:
    """Observed counts, and the index computed from them.

    Attributes:
      returns: number of returns: f64[NUM_BUCKETS, NUM_BINS].
      exposure_s: idle seconds of closed observations, with or without a return: f64[NUM_BUCKETS, NUM_BINS].
      num_fits: number of fits; the index is constant between them.
    """

    def __init__(self, returns: Array | None = None, exposure_s: Array | None = None) -> None:
        """Start from earlier observations, if any."""
        shape = NUM_BUCKETS, NUM_BINS
        self.returns = np.zeros(shape) if returns is None else returns.copy()
        self.exposure_s = np.zeros(shape) if exposure_s is None else exposure_s.copy()
        self.num_fits = 0
        self._num_returns = float(self.returns.sum())
        self._indices: Array = np.zeros(shape)
        self._index: list[list[float]] = []  # the same values as lists, which are faster to read one by one
        self.fit(np.zeros(shape))

    def close(self, bucket: int, idle_s: float, *, returned: bool) -> None:
        """Count a conversation that was idle for `idle_s`, then returned or was no longer observed."""
        if returned and idle_s < HORIZON_S:
            self.returns[bucket, bisect_right(EDGES_S, idle_s) - 1] += 1
            self._num_returns += 1
        self.exposure_s[bucket] += np.minimum(np.maximum(idle_s - _LEFT_S, 0.0), _WIDTHS_S)
        if self._num_returns > _MAX_NUM_RETURNS:
            self._num_returns *= 0.5
            self.returns *= 0.5
            self.exposure_s *= 0.5

    def fit(self, open_s: Array) -> None:
        """Recompute the index; `open_s` is the exposure of conversations that are idle now."""
        hazards = hazards_of(self.returns, self.exposure_s + open_s)
        self._indices = index_of(hazards)
        self._index = self._indices.tolist()
        self.num_fits += 1

    def index(self, bucket: int, bin_number: int) -> float:
        """Return the expected returns per second kept, from a bin's beginning, over the best horizon."""
        return self._index[bucket][bin_number]

    def indices(self, buckets: Integers, bin_numbers: Integers) -> Array:
        """Return `index` for each pair of a bucket and a bin, f64 of their shape."""
        return self._indices.ravel().take(buckets * NUM_BINS + bin_numbers)


def exposure_of(buckets: Iterable[int] | Integers, idle_s: Array) -> Array:
    """Return the seconds that conversations spent in each bucket and bin: f64[NUM_BUCKETS, NUM_BINS]."""
    idle_s = np.minimum(idle_s, HORIZON_S)
    bins = np.searchsorted(_LEFT_S, idle_s, "right") - 1
    cells = np.asarray(buckets, np.int64) * NUM_BINS + bins
    shape, size = (NUM_BUCKETS, NUM_BINS), NUM_BUCKETS * NUM_BINS
    there = np.bincount(cells, minlength=size).reshape(shape)
    so_far_s = np.bincount(cells, idle_s - _LEFT_S[bins], size).reshape(shape)
    passed = there[:, ::-1].cumsum(1)[:, ::-1] - there  # those in later bins spent this bin's whole width
    exposure_s: Array = so_far_s + passed * _WIDTHS_S
    return exposure_s


def hazards_of(returns: Array, exposure_s: Array) -> Array:
    """Return shrunk rates of return per second, all above 0; all arrays f64[NUM_BUCKETS, NUM_BINS]."""
    of_bin, spent_s = returns.sum(0), exposure_s.sum(0)
    total = (spent_s / _MIDDLES_S).sum()
    rate = max(of_bin.sum() / total, 1e-3) if of_bin.sum() and total else _FIRST_RATE
    of_all_turns = (of_bin + _BIN_WEIGHT) / (spent_s + _BIN_WEIGHT * _MIDDLES_S / rate)
    hazards: Array = (returns + _BUCKET_WEIGHT) / (exposure_s + _BUCKET_WEIGHT / of_all_turns)
    return hazards


def index_of(hazards: Array) -> Array:
    """Maximize P(return within h) / E[time until return or end of h] over horizons h that end with a bin.

    This is a Gittins index; where rates only fall, it equals the rate. `hazards` are rates within bins,
    f64[buckets, NUM_BINS]; the result has the same shape and holds at each bin's beginning.
    """
    dues = hazards * _WIDTHS_S
    before = np.concatenate([np.zeros((len(dues), 1)), np.cumsum(dues, 1)], 1)
    held_s = -np.expm1(-dues) / hazards  # expected time within a bin, given presence at its beginning
    passed = before[:, None, :-1] - before[:, :-1, None]  # from the beginning of bin i to that of bin k
    from_i_on = np.triu(np.ones((NUM_BINS, NUM_BINS), bool))
    survival = np.where(from_i_on, np.exp(-np.where(from_i_on, passed, 0.0)), 0.0)
    time_s = np.cumsum(survival * held_s[:, None, :], 2)
    chance = -np.expm1(-np.where(from_i_on, passed + dues[:, None, :], 0.0))
    ratio = np.where(from_i_on, chance / np.where(from_i_on, time_s, 1.0), 0.0)
    index: Array = ratio.max(2)
    return index
