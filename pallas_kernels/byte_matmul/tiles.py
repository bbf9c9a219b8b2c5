"""Tile sizes of the kernel: the part of a product that one program computes, and how far ahead it fetches.

Owns: the sizes, what they must divide, and the choice for a shape. Does not know: how the kernel works.
"""

from __future__ import annotations

from dataclasses import dataclass

# Codes in 128 bytes, the widest swizzled row: the depth of a block.
BLOCK_K = 128
# Columns of the result that a warpgroup has, and the warpgroups that multiply.
WARPGROUP_COLUMNS = 64
NUM_WARPGROUPS = 2
# Rows of a piece of shared memory: x has at most this many, or a multiple.
PIECE_ROWS = 8
MAX_ROWS = 128
# Bytes of shared memory of a program, and the part of them for barriers, scales and a bias.
_SHARED_BYTES, _OTHER_BYTES = 227 * 1024, 2 * 1024
# Programs that are needed to keep a device's memory busy, and those that run at once on 132 multiprocessors.
MIN_PROGRAMS, _MAX_PROGRAMS = 64, 132
# Most blocks that are worth fetching ahead: those of some microseconds.
_MAX_STAGES = 16


@dataclass(frozen=True)
class ByteTile:
    """Work of one program; every program has all rows of x.

    Attributes:
      columns: columns of the result, 64 or 128; for a gated product it reads twice as many. With 64, two
        warpgroups share them: each has every second block of the sum, or the gate or the other factor.
      num_stages: blocks of x and of codes in shared memory, 2 or more; an even number if the warpgroups
        alternate.
    """

    columns: int
    num_stages: int

    @property
    def is_shared(self) -> bool:
        """Whether both warpgroups have the same columns."""
        return self.columns == WARPGROUP_COLUMNS

    def alternates(self, *, gated: bool) -> bool:
        """Return whether each warpgroup has every second block."""
        return self.is_shared and not gated

    def divides(self, depth: int, width: int) -> bool:
        """Return whether this tile divides a product of `width` columns over `depth` elements.

        Each of the two warpgroups needs a block.
        """
        return depth % BLOCK_K == 0 and depth >= NUM_WARPGROUPS * BLOCK_K and width % self.columns == 0

    def shared_bytes(self, num_rows: int, *, gated: bool) -> int:
        """Return the bytes of shared memory of a program with `num_rows` rows."""
        rows = padded_rows(num_rows)
        block = BLOCK_K * (2 * rows + self.columns * (1 + gated))
        exchanged = 4 * rows * WARPGROUP_COLUMNS * self.is_shared
        return self.num_stages * block + 2 * rows * self.columns + exchanged + _OTHER_BYTES

    def fits(self, num_rows: int, *, gated: bool) -> bool:
        """Return whether a program with `num_rows` rows, at most 128, has room for all stages."""
        if self.columns not in (WARPGROUP_COLUMNS, NUM_WARPGROUPS * WARPGROUP_COLUMNS) or self.num_stages < 2:
            return False
        if self.alternates(gated=gated) and self.num_stages % NUM_WARPGROUPS:
            return False  # a warpgroup must see every use of the stages that it waits for
        return self.shared_bytes(num_rows, gated=gated) <= _SHARED_BYTES


def padded_rows(num_rows: int) -> int:
    """Return the rows of x in shared memory; up to seven after the last one of x are zeros."""
    return -(-num_rows // PIECE_ROWS) * PIECE_ROWS


def has_supported_rows(num_rows: int) -> bool:
    """Return whether the kernel supports this number of rows of x."""
    return 0 < num_rows <= MAX_ROWS and (num_rows <= PIECE_ROWS or num_rows % PIECE_ROWS == 0)


def most_stages(columns: int, num_rows: int, *, gated: bool) -> int:
    """Return the stages that shared memory holds, at most 16; fewer than 2 if the tile does not fit."""
    return next((n for n in range(_MAX_STAGES, 1, -1) if ByteTile(columns, n).fits(num_rows, gated=gated)), 0)


def default_tile(num_rows: int, depth: int, width: int, *, gated: bool) -> ByteTile | None:
    """Return the tile for x [num_rows, depth] and a result [num_rows, width]; None leaves it to XLA.

    Gated products have wide tiles: each program reads x once for twice as many codes. Others have narrow
    ones, so that more multiprocessors read. A ring has as many blocks as fit.
    """
    if not has_supported_rows(num_rows):
        return None
    for columns in (128, 64) if gated else (64, 128):
        stages = most_stages(columns, num_rows, gated=gated)
        if stages < 2 or not ByteTile(columns, stages).divides(depth, width):
            continue
        if width // columns >= MIN_PROGRAMS and (
            width // columns <= _MAX_PROGRAMS or columns == 128 or gated
        ):
            return ByteTile(columns, stages)
    return None
