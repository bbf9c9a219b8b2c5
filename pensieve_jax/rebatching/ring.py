"""Where everything is in the ring: arithmetic of columns, without a device.

Owns: the cursor, who holds which row, where each row begins, and its holes. Logical columns only grow; column
c lies at c mod length, so releasing columns (Baton, section 4.1) moves nothing, and rows are end-aligned at
the cursor. A row's keys are in [start, cursor) but for its holes, which vector shaping leaves.
Does not know: priorities, queues, or bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pensieve_jax.rebatching.lattice import RingShape


class RingEntry[O](NamedTuple):
    """A row that somebody holds.

    Attributes:
      owner: who.
      start: its first column, the paper's `index`.
      holes: (first, end) of columns between its tokens that hold none, in order.
    """

    owner: O
    start: int
    holes: list[tuple[int, int]]


class Relayout(NamedTuple):
    """How a ring of another shape is filled from the one before.

    Attributes:
      rows: i32[new batch]: the old row that each takes over, or any for a row that nobody holds.
      columns: i32[new length]: the old place of each new place, -1 for those that hold nothing.
    """

    rows: np.ndarray
    columns: np.ndarray


class Ring[O]:
    """A batch of rows over columns.

    Attributes:
      shape: rows and columns; None until the first `resize`.
      cursor: the column that the next step writes.
    """

    def __init__(self) -> None:
        """Nobody is in it."""
        self.shape: RingShape | None = None
        self.cursor = 0
        self._rows: list[RingEntry[O] | None] = []

    @property
    def span(self) -> int:
        """Columns from the first that is needed up to the cursor."""
        return max((self.cursor - row.start for row in self._rows if row is not None), default=0)

    @property
    def held(self) -> list[tuple[int, O]]:
        """Rows that are held, and by whom."""
        return [(index, row.owner) for index, row in enumerate(self._rows) if row is not None]

    @property
    def num_held(self) -> int:
        """How many those are."""
        return sum(row is not None for row in self._rows)

    def row_span(self, index: int) -> int:
        """Columns of a row, its holes included."""
        return self.cursor - self._row(index).start

    def insert(self, owner: O, num_tokens: int) -> int:
        """Give `owner` a free row that ends at the cursor and begins so many columns before it."""
        index = self._rows.index(None)
        self._rows[index] = RingEntry(owner, self.cursor - num_tokens, [])
        return index

    def release(self, index: int) -> None:
        """Nobody holds this row any more; its columns hold nobody up."""
        assert self._rows[index] is not None
        self._rows[index] = None
        if not any(self._rows):
            self.cursor = 0  # so that it stays small

    def advance(self, num_columns: int = 1, filled_row: int | None = None) -> None:
        """A step has written so many columns: one token of each row, or all of them in `filled_row`.

        What a shaped step writes behind the one token of other rows is padding: a hole.
        """
        if num_columns > 1:
            for index, row in enumerate(self._rows):
                if row is not None and index != filled_row:
                    row.holes.append((self.cursor + 1, self.cursor + num_columns))
        self.cursor += num_columns

    def place(self, column: int) -> int:
        """Where a column lies."""
        assert self.shape is not None
        return column % self.shape.length

    def places(self, index: int) -> np.ndarray:
        """i32[n]: where the tokens of a row lie, the oldest first."""
        row = self._row(index)
        columns = np.arange(row.start, self.cursor)
        for begin, end in reversed(row.holes):
            columns = np.delete(columns, slice(begin - row.start, end - row.start))
        assert self.shape is not None
        return (columns % self.shape.length).astype(np.int32)

    def resize(self, shape: RingShape) -> Relayout | None:
        """Take another shape, which holds all that is held; None if nothing has to be moved."""
        assert shape.length >= self.span and shape.batch >= self.num_held, (shape, self.span)
        old, self.shape = self.shape, shape
        held = [index for index, row in enumerate(self._rows) if row is not None]
        self._rows = [self._rows[index] for index in held] + [None] * (shape.batch - len(held))
        if old is None or not held:
            self.cursor = 0
            return None
        rows = np.zeros(shape.batch, np.int32)
        rows[: len(held)] = held
        # The places of the last columns before the cursor, as many as there are in the shorter ring.
        columns = np.arange(self.cursor - min(old.length, shape.length), self.cursor)
        places = np.full(shape.length, -1, np.int32)
        places[columns % shape.length] = columns % old.length
        return Relayout(rows, places)

    def clear(self) -> None:
        """As if nobody had ever been in it."""
        self.shape, self.cursor, self._rows = None, 0, []

    def _row(self, index: int) -> RingEntry[O]:
        row = self._rows[index]
        assert row is not None, f"nobody holds row {index}"
        return row
