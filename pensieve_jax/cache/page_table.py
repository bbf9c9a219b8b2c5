"""The pages of running sequences as one array, so that the page lists of a step are one gather.

Owns: one row per running sequence, and the free rows.
Does not know: sequences or chunk states.
Called by `ChunkStore`, which decides what a row contains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FEWEST = 16  # initial number of rows and of columns


class PageTable:
    """Page numbers by row and chunk index, 0 for a chunk without a page; it grows in both directions."""

    def __init__(self) -> None:
        """Start with all rows free."""
        self._pages = np.zeros((_FEWEST, _FEWEST), np.int32)
        self._free_rows = list(range(_FEWEST - 1, -1, -1))

    def open(self, pages: Sequence[int]) -> int:
        """Allocate a row for a sequence whose chunks have these pages; returns the row number."""
        if not self._free_rows:
            num_rows = len(self._pages)
            self._pages = np.pad(self._pages, ((0, num_rows), (0, 0)))
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        row = self._free_rows.pop()
        self._widen(len(pages))
        self._pages[row, : len(pages)] = pages
        return row

    def close(self, row: int) -> None:
        """Clear a row and free it."""
        self._pages[row] = 0
        self._free_rows.append(row)

    def set(self, row: int, index: int, page: int) -> None:
        """Record that chunk `index` of the sequence has `page`."""
        if index >= self._pages.shape[1]:
            self._widen(index + 1)
        self._pages[row, index] = page

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """Copy these rows, in order: i32[len(rows), num_columns], padded with 0."""
        return self._pages.take(rows, axis=0)

    def _widen(self, num_chunks: int) -> None:
        while num_chunks > self._pages.shape[1]:
            self._pages = np.pad(self._pages, ((0, 0), (0, self._pages.shape[1])))
