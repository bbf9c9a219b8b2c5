"""Tiles to try for matrix products with few rows.

Owns: the lists.
Does not know: how a product is timed, or which tile is best.
Called by `programs.benchmark_decode_matmul`.
"""

from __future__ import annotations

from pallas_kernels.decode_matmul import MatmulTile
from pallas_kernels.decode_matmul.tiles import ROWS

_TRIED = {  # by (gated, one warpgroup multiplies)
    (True, False): (
        MatmulTile(128, 3), MatmulTile(128, 4), MatmulTile(128, 2, 128), MatmulTile(64, 4), MatmulTile(64, 6),
        MatmulTile(64, 3, 128),
    ),
    (True, True): (
        MatmulTile(128, 3), MatmulTile(128, 4), MatmulTile(128, 5), MatmulTile(64, 3), MatmulTile(64, 4),
        MatmulTile(64, 5), MatmulTile(64, 3, 128),
    ),
    (False, False): (
        MatmulTile(64, 6), MatmulTile(64, 8), MatmulTile(64, 3, 128), MatmulTile(64, 4, 128),
        MatmulTile(128, 5),
    ),
    (False, True): (
        MatmulTile(64, 8), MatmulTile(64, 10), MatmulTile(64, 13), MatmulTile(64, 4, 128),
        MatmulTile(64, 5, 128), MatmulTile(64, 6, 128), MatmulTile(64, 3, 256), MatmulTile(128, 4, 128),
        MatmulTile(128, 8),
    ),
}  # fmt: skip


def tiles(num_rows: int, depth: int, width: int, *, gated: bool) -> list[MatmulTile]:
    """Return the tiles that divide x [num_rows, depth] and weights [depth, width], gated [depth, 2 * width].

    A test checks that shared memory holds all of their stages.
    """
    return [tile for tile in _TRIED[gated, num_rows <= ROWS[0]] if tile.divides(depth, width)]
