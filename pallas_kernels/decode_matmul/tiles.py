"""Tile sizes of the kernel: the part of a product that one program computes, and how far ahead it fetches.

Owns: the sizes and what they must divide; the numbers come from `benchmark_decode_matmul`.
Does not know: how the kernel works.
"""

from __future__ import annotations

from dataclasses import dataclass

# Elements in 128 bytes, the widest swizzled row. A block's sizes are multiples of this.
SWIZZLED = 64
# Rows of x in one program. With more than 64, two warpgroups share the weights.
ROWS = (64, 128)
# Rows of a piece of shared memory: x has at most this many, or a multiple.
PIECE_ROWS = 8
# Bytes of shared memory of a program, and the part of them for barriers and a bias.
_SHARED_BYTES, _OTHER_BYTES = 227 * 1024, 2 * 1024
# Programs that are needed to keep a device's memory busy, and those that run at once on 132 multiprocessors.
MIN_PROGRAMS, _MAX_PROGRAMS = 64, 132
# Least share of program slots that are used over all rounds. Below it the last round is half empty or more,
# but takes as long as the others. For 9,216 columns, a depth of 18,432 and 32 rows on an H200, 144 programs
# of 64 columns take 98 us, XLA, which splits sums, 87, and 72 programs of 128 columns 80.
_MIN_FILL = 0.75


@dataclass(frozen=True)
class MatmulTile:
    """Work of one program; every program has all rows of x.

    Attributes:
      columns: columns of the result, a multiple of 64; for a gated product it reads twice as many.
      num_stages: blocks of x and w in shared memory, 2 or more.
      block_k: elements along the sum of a block, a multiple of 64.
    """

    columns: int
    num_stages: int
    block_k: int = SWIZZLED

    def divides(self, depth: int, width: int) -> bool:
        """Return whether this tile divides a product of `width` columns over `depth` elements."""
        return depth % self.block_k == 0 and width % self.columns == 0

    def shared_bytes(self, num_rows: int, *, gated: bool) -> int:
        """Return the bytes of shared memory of a program with `num_rows` rows."""
        rows = tile_rows(num_rows)
        block = self.block_k * (rows + self.columns * (1 + gated))
        return 2 * (self.num_stages * block + rows * self.columns) + _OTHER_BYTES

    def fits(self, num_rows: int, *, gated: bool) -> bool:
        """Return whether a program with `num_rows` rows, at most 128, has room for all stages."""
        are_whole = self.columns % SWIZZLED == 0 and self.block_k % SWIZZLED == 0
        if not (are_whole and self.columns > 0 and self.block_k > 0 and self.num_stages > 1):
            return False
        return self.shared_bytes(num_rows, gated=gated) <= _SHARED_BYTES


_PREFERRED = {  # by whether it is gated, and whether one warpgroup has all rows
    (True, False): (MatmulTile(128, 4), MatmulTile(64, 6)),
    (True, True): (MatmulTile(128, 4), MatmulTile(64, 4)),
    (False, False): (MatmulTile(64, 8),),
    (False, True): (MatmulTile(64, 6, 128), MatmulTile(128, 4, 128), MatmulTile(64, 10)),
}


def tile_rows(num_rows: int) -> int:
    """Return the rows of x in shared memory, 64 or 128.

    Up to seven rows after the last one of x are zeros; the contents of the others are arbitrary.
    """
    return next(rows for rows in ROWS if rows >= num_rows)


def has_supported_rows(num_rows: int) -> bool:
    """Return whether the kernel supports this number of rows of x."""
    return num_rows <= ROWS[-1] and (num_rows <= PIECE_ROWS or num_rows % PIECE_ROWS == 0)


def default_tile(num_rows: int, depth: int, width: int, *, gated: bool) -> MatmulTile | None:
    """Return the tile for x [num_rows, depth] and a result [num_rows, width]; None leaves it to XLA.

    The choice was measured on H200s. Narrow tiles keep all multiprocessors busy without splitting sums. A
    gated product has two columns of weights for each column of the result, enough for wide tiles. With up to
    64 rows, other products have wide tiles if their narrow programs do not all run at once. A ring has as
    many blocks as fit, except that a fifth block makes gated products slower. Products that leave half of the
    last round of programs empty are XLA's.
    """
    if not has_supported_rows(num_rows):
        return None
    num_programs = {
        tile: width // tile.columns
        for tile in _PREFERRED[gated, num_rows <= ROWS[0]]
        if tile.divides(depth, width) and width // tile.columns >= MIN_PROGRAMS
    }
    in_one_round = (tile for tile, num in num_programs.items() if num <= _MAX_PROGRAMS)
    in_rounds = (tile for tile, num in num_programs.items() if _fills_rounds(num))
    return next(in_one_round, next(in_rounds, None))


def _fills_rounds(num_programs: int) -> bool:
    return num_programs >= _MIN_FILL * -(-num_programs // _MAX_PROGRAMS) * _MAX_PROGRAMS
