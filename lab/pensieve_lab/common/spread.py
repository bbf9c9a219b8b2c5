"""Median and spread of a repeated measurement.

Owns: the statistics of repetitions.
Does not know: what was repeated.
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
