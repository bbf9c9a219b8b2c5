"""Column arithmetic of the ring, without a device.

Owns: the cursor, the owner and first column of each row, and its holes. Logical columns only grow. Column c
lies at place c mod length, so releasing columns (Baton, section 4.1) moves nothing. Rows are end-aligned at
the cursor. A row's keys are in [start, cursor) except for its holes, which vector shaping leaves.
Does not know: priorities, queues, or bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pensieve_jax.rebatching.ring_shapes import RingShape


class RingEntry[O](NamedTuple):
    """Row with an owner.

    Attributes:
      owner: the query that holds the row.
      start: first column of the row, the paper's `index`.
      holes: (first, end) of each range of columns without a token between its tokens, in order.
    """

    owner: O
    start: int
    holes: list[tuple[int, int]]


class Relayout(NamedTuple):
    """Map from a new ring to the old one that it is filled from.

    Attributes:
      rows: i32[new batch]: old row of each new row; arbitrary for a free row.
      columns: i32[new length]: old place of each new place; -1 for an empty place.
    """

    rows: np.ndarray
    columns: np.ndarray


class Ring[O]:
    """Rows of a batch over circular columns.

    Attributes:
      shape: rows and columns; None until the first `resize`.
      cursor: column that the next step writes.
    """

    def __init__(self) -> None:
        """Create an empty ring without a shape."""
        self.shape: RingShape | None = None
        self.cursor = 0
        self._rows: list[RingEntry[O] | None] = []

    @property
    def span(self) -> int:
        """Columns from the first of any held row to the cursor."""
        return max((self.cursor - row.start for row in self._rows if row is not None), default=0)

    @property
    def held(self) -> list[tuple[int, O]]:
        """Index and owner of every held row."""
        return [(index, row.owner) for index, row in enumerate(self._rows) if row is not None]

    @property
    def num_held(self) -> int:
        """Number of held rows."""
        return sum(row is not None for row in self._rows)

    def row_span(self, index: int) -> int:
        """Return the columns of a row, its holes included."""
        return self.cursor - self._row(index).start

    def insert(self, owner: O, num_tokens: int) -> int:
        """Give `owner` a free row of `num_tokens` columns that ends at the cursor; return its index."""
        index = self._rows.index(None)
        self._rows[index] = RingEntry(owner, self.cursor - num_tokens, [])
        return index

    def release(self, index: int) -> None:
        """Free a row, so that its columns no longer count for the span."""
        assert self._rows[index] is not None
        self._rows[index] = None
        if not any(self._rows):
            self.cursor = 0  # so that it stays small

    def advance(self, num_columns: int = 1, filled_row: int | None = None) -> None:
        """Move the cursor past the columns of a step: one token per row, or `num_columns` in `filled_row`.

        A shaped step writes padding after the one token of every other row, which becomes a hole.
        """
        if num_columns > 1:
            for index, row in enumerate(self._rows):
                if row is not None and index != filled_row:
                    row.holes.append((self.cursor + 1, self.cursor + num_columns))
        self.cursor += num_columns

    def place(self, column: int) -> int:
        """Return the place of a logical column."""
        assert self.shape is not None
        return column % self.shape.length

    def places(self, index: int) -> np.ndarray:
        """Return i32[n], the places of a row's tokens, the oldest first."""
        row = self._row(index)
        columns = np.arange(row.start, self.cursor)
        for begin, end in reversed(row.holes):
            columns = np.delete(columns, slice(begin - row.start, end - row.start))
        assert self.shape is not None
        return (columns % self.shape.length).astype(np.int32)

    def resize(self, shape: RingShape) -> Relayout | None:
        """Change to a shape that fits all held rows; return None if nothing has to be moved."""
        assert shape.length >= self.span and shape.batch >= self.num_held, (shape, self.span)
        old, self.shape = self.shape, shape
        held = [index for index, row in enumerate(self._rows) if row is not None]
        self._rows = [self._rows[index] for index in held] + [None] * (shape.batch - len(held))
        if old is None or not held:
            self.cursor = 0
            return None
        rows = np.zeros(shape.batch, np.int32)
        rows[: len(held)] = held
        # Only the last columns before the cursor move, as many as the shorter ring has.
        columns = np.arange(self.cursor - min(old.length, shape.length), self.cursor)
        places = np.full(shape.length, -1, np.int32)
        places[columns % shape.length] = columns % old.length
        return Relayout(rows, places)

    def clear(self) -> None:
        """Reset to an empty ring without a shape."""
        self.shape, self.cursor, self._rows = None, 0, []

    def _row(self, index: int) -> RingEntry[O]:
        row = self._rows[index]
        assert row is not None, f"row {index} is free"
        return row
