"""Which part of a product one program of the kernel makes, and how far ahead it fetches.

Owns: the sizes and what they must divide; the numbers come from `scripts/benchmark_decode_matmul.py`. Does
not know how the kernel works. Called by: every module of the package; tests and the benchmark pass tiles of
their own.
"""

from __future__ import annotations

from dataclasses import dataclass

# Elements of 128 bytes, the widest row that is swizzled: what a block's sizes are multiples of.
SWIZZLED = 64
# Rows of x of one program; two warpgroups share the weights if there are more than 64.
ROWS = (64, 128)
# Rows of a piece of shared memory: x has fewer, or a multiple; so have transposed weights.
PIECE_ROWS = 8
# Of shared memory that a program can have, and of those what its barriers have.
SHARED_BYTES, _BARRIER_BYTES = 227 * 1024, 1024
# Programs below which a device's memory is not kept busy.
MIN_PROGRAMS = 64
# Programs that a device of 132 multiprocessors runs at once: in clusters, which must lie within a part of the
# device, and by themselves. Between the two, clusters would leave a few programs for a second round.
_CLUSTERED, ALONE = 120, 132
# Stages that are missed while they are not being filled.
_FEW_STAGES = 3
# Of the programs that a device has room for in all rounds: with fewer, the last round is nearly empty and
# takes as long as the others. XLA, which divides sums, reads 9,216 columns in 0.76 of the time of 144
# programs.
_LEAST_FILL = 0.75


@dataclass(frozen=True)
class MatmulTile:
    """What one program does; all rows of x are in each.

    Attributes:
      columns: of the result, a multiple of 64, or of 8 where weights are transposed; of a gated product it
        reads twice as many.
      num_stages: blocks of x and w in shared memory, 2 or more.
      cluster: programs, of neighbouring columns, to which a block of x is sent at once.
      block_k: elements along the sum of a block, a multiple of 64.
    """

    columns: int
    num_stages: int
    cluster: int = 1
    block_k: int = SWIZZLED

    @property
    def frees_at_once(self) -> bool:
        """Whether a block is given back as its products end, and not only while those of the next run.

        Products do not overlap then; but of few stages one would be a large part of what is on its way.
        """
        return self.block_k > SWIZZLED and self.num_stages <= _FEW_STAGES

    def divides(self, depth: int, width: int) -> bool:
        """Whether a product over `depth` elements, `width` columns wide, is made of such parts."""
        return depth % self.block_k == 0 and width % (self.columns * self.cluster) == 0

    def shared_bytes(self, num_rows: int, *, gated: bool) -> int:
        """What a program of `num_rows` rows takes of shared memory."""
        rows = tile_rows(num_rows)
        block = self.block_k * (rows + self.columns * (1 + gated))
        return 2 * (self.num_stages * block + rows * self.columns) + _BARRIER_BYTES

    def fits(self, num_rows: int, *, gated: bool, transposed: bool) -> bool:
        """Whether a program can be made of it, for weights of this layout, and has room for all stages."""
        multiple = PIECE_ROWS if transposed else SWIZZLED
        are_whole = self.columns % multiple == 0 and self.block_k % SWIZZLED == 0
        return are_whole and self.num_stages > 1 and self.shared_bytes(num_rows, gated=gated) <= SHARED_BYTES


def _narrow(num_stages: int, clusters: tuple[int, ...] = (4, 2, 1)) -> tuple[MatmulTile, ...]:
    return tuple(MatmulTile(64, num_stages, cluster) for cluster in clusters)


_PREFERRED = {  # by whether it is gated, and whether one warpgroup has all rows
    (True, False): (MatmulTile(128, 4, 2), MatmulTile(128, 3), *_narrow(6)),
    (True, True): (MatmulTile(128, 3), *_narrow(6)),
    (False, False): _narrow(8),
    (False, True): (*_narrow(13, (8,)), *_narrow(10, (4, 1)), *_narrow(8)),
}


def tile_rows(num_rows: int) -> int:
    """Rows of x in shared memory; those behind its last are zeros, and not stored."""
    return next(rows for rows in ROWS if rows >= num_rows)


def has_served_rows(num_rows: int) -> bool:
    """Whether the kernel serves an x of so many rows."""
    return num_rows <= ROWS[-1] and (num_rows <= PIECE_ROWS or num_rows % PIECE_ROWS == 0)


def default_tile(num_rows: int, depth: int, width: int, *, gated: bool) -> MatmulTile | None:
    """The measured choice for x [num_rows, depth] and a result [num_rows, width]; None: leave it to XLA.

    Narrow tiles keep all multiprocessors busy without dividing sums, and a cluster saves what they would read
    of x again and again, unless it keeps programs from running all at once. A gated product has two columns
    of weights for each of its own, and enough of them for wide tiles. Where x takes half the room, more
    blocks are on their way. What would leave most of a last round of programs empty is XLA's.
    """
    if not has_served_rows(num_rows):
        return None
    for tile in _PREFERRED[gated, num_rows <= ROWS[0]]:
        num_programs = width // tile.columns
        waits = tile.cluster > 1 and _CLUSTERED < num_programs <= ALONE
        rounds = -(-num_programs // ALONE)
        fills = rounds == 1 or num_programs >= _LEAST_FILL * rounds * ALONE
        if tile.divides(depth, width) and num_programs >= MIN_PROGRAMS and fills and not waits:
            return tile
    return None
