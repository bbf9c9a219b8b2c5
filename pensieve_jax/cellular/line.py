"""A line of numbers: first in, first out, many at a time.

Owns: the array and its ends.
Does not know: what the numbers are.
"""

from __future__ import annotations

import numpy as np


class Line:
    """Of i64."""

    def __init__(self) -> None:
        """Nobody stands in it."""
        self._values = np.empty(1024, np.int64)
        self._begin = self._end = 0

    def __len__(self) -> int:
        """How many stand in it."""
        return self._end - self._begin

    @property
    def values(self) -> np.ndarray:
        """All of them, in order; not to be kept."""
        return self._values[self._begin : self._end]

    def push(self, values: np.ndarray) -> None:
        """These come last."""
        if self._end + len(values) > len(self._values):
            waiting = self.values
            self._values = np.empty(max(1024, 2 * (len(waiting) + len(values))), np.int64)
            self._values[: len(waiting)] = waiting
            self._begin, self._end = 0, len(waiting)
        self._values[self._end : self._end + len(values)] = values
        self._end += len(values)

    def pop(self, num: int) -> np.ndarray:
        """The first `num`, or all if there are fewer."""
        taken = self.values[:num].copy()
        self._begin += len(taken)
        return taken

    def keep(self, is_kept: np.ndarray) -> None:
        """Only these stay, a truth value for each of `values`."""
        kept = self.values[is_kept]
        self._values[self._begin : self._begin + len(kept)] = kept
        self._end = self._begin + len(kept)
