"""Crossing of a curve with a level.

Owns: the interpolation between a curve's points.
Does not know: what the curve shows.
Called by programs and pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def crossing_at(level: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the first x at which the piecewise linear curve rises above `level`, or None."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y0 <= level < y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None
