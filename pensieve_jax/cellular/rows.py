"""Rows of state: which are free on a device, and which are promised.

Owns: how many rows there are, the free ones of each device and kind, and what admitted requests may still
take.
Does not know: what a row holds, or why it is taken.

A request is admitted when its peak is free of promises, on every device, since nobody knows where it will
run. So whoever was admitted never waits for a row, and half-done requests cannot wait for one another.
"""

from __future__ import annotations

import numpy as np

_DEFAULT_BYTES = 2**30
_DEFAULT_LEAST, _DEFAULT_MOST = 256, 4096


def num_rows_for(asked: int | None, row_bytes: int) -> int:
    """What `CellularConfig.num_rows` is with rows of so many bytes, all kinds of state together."""
    if asked is not None:
        return asked
    fitting = _DEFAULT_BYTES // row_bytes - 1  # one is the initial state
    return min(max(fitting, _DEFAULT_LEAST), _DEFAULT_MOST)


class StateRows:
    """Of one device and kind.

    Attributes:
      num_free: rows that hold nothing.
    """

    def __init__(self, num_rows: int) -> None:
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)
        self.num_free = num_rows

    def take(self, num: int) -> np.ndarray:
        """i32[num]: rows that were free."""
        if num > self.num_free:
            raise AssertionError(f"{num} rows of {self.num_free}: admission promised too many")
        self.num_free -= num
        return self._free[self.num_free : self.num_free + num].copy()

    def give(self, rows: np.ndarray) -> None:
        """These are free again, in program order: what is launched later may take them."""
        self._free[self.num_free : self.num_free + len(rows)] = rows
        self.num_free += len(rows)

    def free_rows(self) -> np.ndarray:
        """All that are free, for checks."""
        return self._free[: self.num_free]


class RowBudget:
    """Rows of every kind that admitted requests may hold, on each device alike.

    Attributes:
      num_rows: of each kind.
      promised: i64[kinds].
    """

    def __init__(self, num_rows: int, num_kinds: int) -> None:
        self.num_rows = num_rows
        self.promised = np.zeros(num_kinds, np.int64)

    def num_fitting(self, needed: np.ndarray) -> int:
        """How many of these requests, i64[requests, kinds] of at most `num_rows`, `admit` would admit."""
        fits = (self.promised + np.cumsum(needed, axis=0) <= self.num_rows).all(axis=1)
        return len(fits) if fits.all() else int(np.argmin(fits))

    def admit(self, needed: np.ndarray) -> int:
        """Promise the rows of as many requests as fit, in order, and return how many they are."""
        num = self.num_fitting(needed)
        self.promised = self.promised + needed[:num].sum(axis=0)
        return num

    def end(self, needed: np.ndarray) -> None:
        """Requests of these rows need none any more."""
        self.promised = self.promised - needed.sum(axis=0)
