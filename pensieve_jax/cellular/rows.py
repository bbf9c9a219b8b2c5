"""Rows of state: free rows of each device, and rows that are promised to requests.

Owns: the number of rows, the free rows of each device and kind, and the rows promised to admitted requests.
Does not know: the contents of a row, or why it is taken.

A request is admitted when its peak number of rows is not promised to others, on every device, since it may
run on any of them. So an admitted request never waits for a row, and running requests cannot deadlock.
"""

from __future__ import annotations

import numpy as np

_DEFAULT_BYTES = 2**30
_DEFAULT_LEAST, _DEFAULT_MOST = 256, 4096


def num_rows_for(asked: int | None, row_bytes: int) -> int:
    """Resolve `CellularConfig.num_rows`; `row_bytes` is the size of one row of every kind of state."""
    if asked is not None:
        return asked
    fitting = _DEFAULT_BYTES // row_bytes - 1  # one is the initial state
    return min(max(fitting, _DEFAULT_LEAST), _DEFAULT_MOST)


class StateRows:
    """Rows of one device and kind of state.

    Attributes:
      num_free: number of free rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)
        self.num_free = num_rows

    def allocate(self, num: int) -> np.ndarray:
        """Take free rows, i32[num]."""
        if num > self.num_free:
            raise AssertionError(f"{num} rows of {self.num_free} free ones: admission promised too many")
        self.num_free -= num
        return self._free[self.num_free : self.num_free + num].copy()

    def free(self, rows: np.ndarray) -> None:
        """Free rows in program order: later launches may take them."""
        self._free[self.num_free : self.num_free + len(rows)] = rows
        self.num_free += len(rows)

    def free_rows(self) -> np.ndarray:
        """Return all free rows, for checks."""
        return self._free[: self.num_free]


class RowBudget:
    """Rows promised to admitted requests. The promise holds on each device.

    Attributes:
      num_rows: rows of each kind.
      promised: i64[kinds], promised rows.
    """

    def __init__(self, num_rows: int, num_kinds: int) -> None:
        self.num_rows = num_rows
        self.promised = np.zeros(num_kinds, np.int64)

    def num_fitting(self, needed: np.ndarray) -> int:
        """Return how many requests `admit` admits; each of `needed`, i64[requests, kinds], fits alone."""
        fits = (self.promised + np.cumsum(needed, axis=0) <= self.num_rows).all(axis=1)
        return len(fits) if fits.all() else int(np.argmin(fits))

    def admit(self, needed: np.ndarray) -> int:
        """Promise rows to the first requests that fit; return their number."""
        num = self.num_fitting(needed)
        self.promised = self.promised + needed[:num].sum(axis=0)
        return num

    def end(self, needed: np.ndarray) -> None:
        """Release the promised rows of finished requests."""
        self.promised = self.promised - needed.sum(axis=0)
