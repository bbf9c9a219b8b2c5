"""Where a curve crosses a level.

Owns: how a curve is read between its points.
Does not know: what it is of.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def crossing_at(level: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The x at which straight lines between points first rise over `level`; None where they do not."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y0 <= level < y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None
