"""The pages of running sequences as one array, so that a step's page lists are one gather.

Owns: a row for each sequence that runs, and which rows are free. Does not know: sequences, or states: what
stands in a row is for `ChunkStore` to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FEWEST = 16  # rows, and columns, to begin with


class PageTable:
    """Page numbers by row and chunk, 0 where a chunk has none; it grows in both directions."""

    def __init__(self) -> None:
        """No rows in use."""
        self._pages = np.zeros((_FEWEST, _FEWEST), np.int32)
        self._free_rows = list(range(_FEWEST - 1, -1, -1))

    def open(self, pages: Sequence[int]) -> int:
        """Take a row for a sequence whose chunks have these pages; returns its number."""
        if not self._free_rows:
            num_rows = len(self._pages)
            self._pages = np.pad(self._pages, ((0, num_rows), (0, 0)))
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        row = self._free_rows.pop()
        self._widen(len(pages))
        self._pages[row, : len(pages)] = pages
        return row

    def close(self, row: int) -> None:
        """Give a row back."""
        self._pages[row] = 0
        self._free_rows.append(row)

    def set(self, row: int, index: int, page: int) -> None:
        """Chunk `index` has `page` now."""
        if index >= self._pages.shape[1]:
            self._widen(index + 1)
        self._pages[row, index] = page

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """Copies of these rows, one after the other: i32[len(rows), some number of chunks]."""
        return self._pages.take(rows, axis=0)

    def _widen(self, num_chunks: int) -> None:
        while num_chunks > self._pages.shape[1]:
            self._pages = np.pad(self._pages, ((0, 0), (0, self._pages.shape[1])))
