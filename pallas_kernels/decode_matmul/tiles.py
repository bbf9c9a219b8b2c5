"""Which part of a product one program of the kernel makes, and how far ahead it fetches.

Owns: the sizes and what they must divide; the numbers come from `benchmark_decode_matmul`. Does
not know how the kernel works.
"""

from __future__ import annotations

from dataclasses import dataclass

# Elements of 128 bytes, the widest row that is swizzled: what a block's sizes are multiples of.
SWIZZLED = 64
# Rows of x of one program; two warpgroups share the weights if there are more than 64.
ROWS = (64, 128)
# Rows of a piece of shared memory: x has fewer, or a multiple.
PIECE_ROWS = 8
# Of shared memory that a program can have, and of those what its barriers and a bias have.
_SHARED_BYTES, _OTHER_BYTES = 227 * 1024, 2 * 1024
# Programs below which a device's memory is not kept busy, and those that one of 132 multiprocessors runs at
# once.
MIN_PROGRAMS, _MAX_PROGRAMS = 64, 132
# Of the programs that a device has room for in all rounds: with fewer, the last round, half empty or more,
# takes as long as the others. For 9,216 columns, 18,432 deep, and 32 rows on an H200 144 programs of 64 take
# 98 us, XLA, which divides sums, 87, and 72 programs of 128 take 80.
_LEAST_FILL = 0.75


@dataclass(frozen=True)
class MatmulTile:
    """What one program does; all rows of x are in each.

    Attributes:
      columns: of the result, a multiple of 64; of a gated product it reads twice as many.
      num_stages: blocks of x and w in shared memory, 2 or more.
      block_k: elements along the sum of a block, a multiple of 64.
    """

    columns: int
    num_stages: int
    block_k: int = SWIZZLED

    def divides(self, depth: int, width: int) -> bool:
        """Whether a product over `depth` elements, `width` columns wide, is made of such parts."""
        return depth % self.block_k == 0 and width % self.columns == 0

    def shared_bytes(self, num_rows: int, *, gated: bool) -> int:
        """What a program of `num_rows` rows takes of shared memory."""
        rows = tile_rows(num_rows)
        block = self.block_k * (rows + self.columns * (1 + gated))
        return 2 * (self.num_stages * block + rows * self.columns) + _OTHER_BYTES

    def fits(self, num_rows: int, *, gated: bool) -> bool:
        """Whether a program of up to 128 rows can be made of it, and has room for all stages."""
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
    """Rows of x in shared memory, 64 or 128: behind its last up to seven of zeros, then of anything."""
    return next(rows for rows in ROWS if rows >= num_rows)


def has_supported_rows(num_rows: int) -> bool:
    """Whether the kernel serves an x of so many rows."""
    return num_rows <= ROWS[-1] and (num_rows <= PIECE_ROWS or num_rows % PIECE_ROWS == 0)


def default_tile(num_rows: int, depth: int, width: int, *, gated: bool) -> MatmulTile | None:
    """The choice for x [num_rows, depth] and a result [num_rows, width], by H200s; None: leave it to XLA.

    Narrow tiles keep all multiprocessors busy without dividing sums. A gated product has two columns of
    weights for each of its own, and enough of them for wide tiles; so have, of up to 64 rows, those whose
    narrow programs do not all run at once. A ring has as many blocks as fit, but for gated products, which a
    fifth block makes slower. What would leave half of a last round of programs empty is XLA's.
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
    return num_programs >= _LEAST_FILL * -(-num_programs // _MAX_PROGRAMS) * _MAX_PROGRAMS
