"""The tiles that are tried for products of few rows, by layout of the weights.

Owns: the lists. Does not know: how a product is timed, or which tile is best. Called by:
benchmark_decode_matmul.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.decode_matmul import MatmulTile
from pallas_kernels.decode_matmul.tiles import (
    ALONE,
    MIN_PROGRAMS,
    PIECE_ROWS,
    ROWS,
    SHARED_BYTES,
)

_TRIED = {  # by whether it is gated, and whether one warpgroup multiplies, beside more blocks of weights
    (True, False): (
        MatmulTile(128, 3), MatmulTile(128, 3, 2), MatmulTile(128, 4), MatmulTile(128, 4, 2),
        MatmulTile(64, 6, 2), MatmulTile(64, 6, 4),
    ),
    (True, True): (
        MatmulTile(128, 3), MatmulTile(128, 4), MatmulTile(128, 5), MatmulTile(128, 5, 2), MatmulTile(64, 9),
        MatmulTile(64, 4),
    ),
    (False, False): (
        MatmulTile(64, 8, 4), MatmulTile(64, 8, 8), MatmulTile(64, 8, 2), MatmulTile(64, 8),
        MatmulTile(128, 4),
    ),
    (False, True): (
        MatmulTile(64, 8, 4), MatmulTile(64, 13, 4), MatmulTile(64, 13, 2), MatmulTile(64, 13),
        MatmulTile(64, 13, 8), MatmulTile(64, 10, 4), MatmulTile(64, 10),
    ),
}  # fmt: skip
# For transposed weights, clusters by the depth of a block: of 64 columns, of 128, and of as many as make one
# round of programs, which large clusters would keep from running at once.
_NARROW_CLUSTERS = {64: (1, 4), 128: (1, 2, 4, 8), 256: (1, 4)}
_WIDE_CLUSTERS = {64: (1, 2), 128: (1, 2, 4), 256: (1,)}
_EVEN_CLUSTERS = {64: (1,), 128: (1, 2), 256: (1, 2)}
_NARROW, _WIDE, _DEEP = 64, 128, 128
# Of shared memory of a program: what should do if only latency counted.
_FEW_BYTES = 150_000


def tiles(num_rows: int, depth: int, width: int, *, gated: bool) -> list[MatmulTile]:
    """For weights [depth, width]; gated [depth, 2 * width]."""
    return [tile for tile in _TRIED[gated, num_rows <= ROWS[0]] if tile.divides(depth, width)]


def deeper_tiles(num_rows: int, depth: int, width: int, *, gated: bool) -> list[MatmulTile]:
    """For the same weights, twice as deep: what fewer and larger copies change by themselves."""
    columns = _WIDE if gated else _NARROW
    tile = _filled(MatmulTile(columns, 0, 1, _DEEP), num_rows, gated=gated)
    return [tile] if tile.num_stages > 1 and tile.divides(depth, width) else []


def transposed_tiles(num_rows: int, depth: int, width: int, *, gated: bool) -> list[MatmulTile]:
    """For weights [width, depth], gated [2 * width, depth], with all the stages that there is room for.

    Of 64 and 128 columns, and of as few as make one round of programs; one of them with fewer stages as well.
    """
    few_stages = _filled(MatmulTile(_NARROW, 0, 4, _DEEP), num_rows, gated=gated, num_bytes=_FEW_BYTES)
    sizes = {_NARROW: _NARROW_CLUSTERS, _WIDE: _WIDE_CLUSTERS}
    even = even_columns(width)
    if even is not None:
        sizes.setdefault(even, _EVEN_CLUSTERS)
    all_stages = [
        _filled(MatmulTile(columns, 0, cluster, block_k), num_rows, gated=gated)
        for columns, clusters_of in sizes.items()
        if width // columns >= MIN_PROGRAMS
        for block_k, clusters in clusters_of.items()
        for cluster in clusters
    ]
    found = dict.fromkeys((*all_stages, few_stages))
    return [tile for tile in found if tile.num_stages > 1 and tile.divides(depth, width)]


def even_columns(width: int) -> int | None:
    """Of the narrowest tile whose programs all run at once, a multiple of 8; None: none divides them."""
    fewest = -(-width // (ALONE * PIECE_ROWS)) * PIECE_ROWS
    return next((columns for columns in range(fewest, _WIDE + 1, PIECE_ROWS) if width % columns == 0), None)


def _filled(tile: MatmulTile, num_rows: int, *, gated: bool, num_bytes: int = SHARED_BYTES) -> MatmulTile:
    """With as many stages as a program of so many bytes has room for."""
    without, with_one = (
        dataclasses.replace(tile, num_stages=num).shared_bytes(num_rows, gated=gated) for num in (0, 1)
    )
    return dataclasses.replace(tile, num_stages=(num_bytes - without) // (with_one - without))
