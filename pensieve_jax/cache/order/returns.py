"""When conversations return, estimated from those that did and those that did not (yet).

Owns: which turns are alike (buckets), the rate of return by bucket and idle time, and the index made of it.
Does not know: chunks, costs, who is idle now (`return_log`), or what is done with the index (`policies`).

The estimate is that of survival analysis: returns in a stretch of idle time, over the time that all
conversations spent in it, those that have not returned included. It is shrunk: a bucket to all turns of its
stretch, and these to `r / idle time`, which is what the paper's order assumes (section 4.3.1). So without
evidence the order is the paper's, in steps of a stretch's width, and time beyond all that was seen does not
look promising.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

type Array = NDArray[np.float64]
type Integers = NDArray[np.int64]

# Turns are alike if they are both first ones or both later ones of their conversation, and brought about as
# much text each way. What tells who returns was chosen on half of the sessions of public traces: see
# lab/docs/learned_order.md.
_PROMPT_TOKENS = (100, 400, 1500, 5000, 12000)
_OUTPUT_TOKENS = (250,)
_NUM_SIZES = (len(_PROMPT_TOKENS) + 1) * (len(_OUTPUT_TOKENS) + 1)
UNKNOWN = 0
"""The bucket of conversations that no turn was seen of."""
NUM_BUCKETS = 1 + 2 * _NUM_SIZES

# Bin i of idle time is [EDGES_S[i], EDGES_S[i + 1]), in seconds; the last one has no end.
EDGES_S: tuple[float, ...] = (0.0, *np.geomspace(1.0, 20_000.0, 28)[:-1].tolist())
NUM_BINS = len(EDGES_S)
ENDS_S: Array = np.array([*EDGES_S[1:], np.inf])
HORIZON_S = 20_000.0
"""Idle time beyond this is not observed: whoever has not returned by then has left."""

_BUCKET_WEIGHT, _BIN_WEIGHT = 0.7, 3.0  # of what is shrunk to, in returns
_MAX_NUM_RETURNS = 50_000.0  # then the older half counts half: habits change
_FIRST_RATE = 0.1  # r before anything was seen; it scales every index alike

_WIDTHS_S: Array = np.diff([*EDGES_S, HORIZON_S])
_LEFT_S: Array = np.array(EDGES_S)
_MIDDLES_S: Array = np.maximum(np.sqrt(np.maximum(_LEFT_S, 0.5) * np.array([*EDGES_S[1:], HORIZON_S])), 0.5)


def bucket_of(*, is_first: bool, prompt_tokens: int, output_tokens: int) -> int:
    """The bucket of a turn: whether it is its conversation's first, and its own tokens, without history."""
    sizes = bisect_right(_PROMPT_TOKENS, prompt_tokens) * (len(_OUTPUT_TOKENS) + 1)
    sizes += bisect_right(_OUTPUT_TOKENS, output_tokens)
    return 1 + (not is_first) * _NUM_SIZES + sizes


def bin_of(last_active_s: float, now_s: float) -> int:
    """The bin of idle time that somebody is in; it begins at exactly `last_active_s + EDGES_S[bin]`."""
    found = bisect_right(EDGES_S, now_s - last_active_s) - 1
    # The difference may be rounded across an edge; what counts is the sum, as `ReturnsPolicy.until_s` has it.
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
    """Counts of what was observed, and the index that follows.

    Attributes:
      returns: how many conversations returned: f64[NUM_BUCKETS, NUM_BINS].
      exposure_s: seconds that closed observations spent, likewise: of those that returned, or of which
        it will never be known.
      num_fits: how often the index was made anew; it stands in between.
    """

    def __init__(self, returns: Array | None = None, exposure_s: Array | None = None) -> None:
        """What was observed before, if anything."""
        shape = NUM_BUCKETS, NUM_BINS
        self.returns = np.zeros(shape) if returns is None else returns.copy()
        self.exposure_s = np.zeros(shape) if exposure_s is None else exposure_s.copy()
        self.num_fits = 0
        self._num_returns = float(self.returns.sum())
        self._indices: Array = np.zeros(shape)
        self._index: list[list[float]] = []  # the same
        self.fit(np.zeros(shape))

    def close(self, bucket: int, idle_s: float, *, returned: bool) -> None:
        """A conversation returned after so long idle, or will not be observed any more."""
        if returned and idle_s < HORIZON_S:
            self.returns[bucket, bisect_right(EDGES_S, idle_s) - 1] += 1
            self._num_returns += 1
        self.exposure_s[bucket] += np.minimum(np.maximum(idle_s - _LEFT_S, 0.0), _WIDTHS_S)
        if self._num_returns > _MAX_NUM_RETURNS:
            self._num_returns *= 0.5
            self.returns *= 0.5
            self.exposure_s *= 0.5

    def fit(self, open_s: Array) -> None:
        """Make the index anew; `open_s` is the exposure of conversations that are idle now."""
        hazards = hazards_of(self.returns, self.exposure_s + open_s)
        self._indices = index_of(hazards)
        self._index = self._indices.tolist()
        self.num_fits += 1

    def index(self, bucket: int, bin_number: int) -> float:
        """Returns per second of being held, at the beginning of a bin, over the horizon that is best."""
        return self._index[bucket][bin_number]

    def indices(self, buckets: Integers, bin_numbers: Integers) -> Array:
        """Return `index` for each pair of a bucket and a bin, f64 of their shape."""
        return self._indices.ravel().take(buckets * NUM_BINS + bin_numbers)


def exposure_of(buckets: Iterable[int] | Integers, idle_s: Array) -> Array:
    """Seconds that conversations of these buckets, idle for so long, spent: f64[NUM_BUCKETS, NUM_BINS]."""
    idle_s = np.minimum(idle_s, HORIZON_S)
    bins = np.searchsorted(_LEFT_S, idle_s, "right") - 1
    cells = np.asarray(buckets, np.int64) * NUM_BINS + bins
    shape, size = (NUM_BUCKETS, NUM_BINS), NUM_BUCKETS * NUM_BINS
    there = np.bincount(cells, minlength=size).reshape(shape)
    so_far_s = np.bincount(cells, idle_s - _LEFT_S[bins], size).reshape(shape)
    passed = there[:, ::-1].cumsum(1)[:, ::-1] - there  # those in later bins spent all of this one's width
    exposure_s: Array = so_far_s + passed * _WIDTHS_S
    return exposure_s


def hazards_of(returns: Array, exposure_s: Array) -> Array:
    """Rates of return a second, shrunk; all above 0. Arguments and result f64[NUM_BUCKETS, NUM_BINS]."""
    of_bin, spent_s = returns.sum(0), exposure_s.sum(0)
    total = (spent_s / _MIDDLES_S).sum()
    rate = max(of_bin.sum() / total, 1e-3) if of_bin.sum() and total else _FIRST_RATE
    everybody = (of_bin + _BIN_WEIGHT) / (spent_s + _BIN_WEIGHT * _MIDDLES_S / rate)
    hazards: Array = (returns + _BUCKET_WEIGHT) / (exposure_s + _BUCKET_WEIGHT / everybody)
    return hazards


def index_of(hazards: Array) -> Array:
    """The largest, over horizons that end with a bin, of P(return within) / E[time until return or its end].

    This is a Gittins index: where rates only fall, it is the rate itself. `hazards` f64[buckets, NUM_BINS],
    rates within bins; the result, likewise, is as of each bin's beginning.
    """
    dues = hazards * _WIDTHS_S
    before = np.concatenate([np.zeros((len(dues), 1)), np.cumsum(dues, 1)], 1)
    held_s = -np.expm1(-dues) / hazards  # within a bin, by somebody who is there at its beginning
    passed = before[:, None, :-1] - before[:, :-1, None]  # from the beginning of bin i to that of bin k
    from_i_on = np.triu(np.ones((NUM_BINS, NUM_BINS), bool))
    survival = np.where(from_i_on, np.exp(-np.where(from_i_on, passed, 0.0)), 0.0)
    time_s = np.cumsum(survival * held_s[:, None, :], 2)
    chance = -np.expm1(-np.where(from_i_on, passed + dues[:, None, :], 0.0))
    ratio = np.where(from_i_on, chance / np.where(from_i_on, time_s, 1.0), 0.0)
    index: Array = ratio.max(2)
    return index
