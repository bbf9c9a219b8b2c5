"""Median and spread of a repeated measurement, and percentiles of many values.

Owns: the statistics of repetitions, and those of times of requests.
Does not know: what was measured.
Called by programs and experiments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np


class Spread(NamedTuple):
    """Median, quartiles and 90th percentile; NaN without values."""

    median: float
    low: float
    high: float
    p90: float
    num_values: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the statistics of values in any order."""
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan, 0)
        low, median, high, p90 = np.percentile(values, [25, 50, 75, 90]).tolist()
        return cls(median, low, high, p90, len(values))

    def as_dict(self) -> dict[str, float | int | None]:
        """Return a dict for JSON, with None for NaN."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in self._asdict().items()
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, 90th and 99th percentile; None without values."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}
