"""A measurement that was repeated: its median, and how far repetitions lie apart.

Owns: what is said of repetitions. Does not know: what was repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np


class Spread(NamedTuple):
    """Median and quartiles, and the 90th percentile; NaN where nothing was measured."""

    median: float
    low: float
    high: float
    p90: float
    num_values: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of repetitions in any order."""
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan, 0)
        low, median, high, p90 = np.percentile(values, [25, 50, 75, 90]).tolist()
        return cls(median, low, high, p90, len(values))

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON, which has no NaN."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in self._asdict().items()
        }
