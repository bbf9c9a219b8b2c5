"""Tile sizes of the grouped products: rows of a block, columns of a program's item, and the ring of stages.

Owns: the sizes, what they must divide, and the choice between both forms of the kernel.
Does not know: how the kernel works. Called by: `api` and benchmarks.

With few rows for each expert, weights are the 64 rows of a matrix instruction, and tokens are its columns: 8
or more of them. With many, tokens are its rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

INSTRUCTION_ROWS = 64
"""Rows of one warpgroup's matrix instruction."""

SWIZZLED = 64
"""Elements in 128 bytes, the widest swizzled row. Depth and columns are multiples of this."""

NUM_PROGRAMS = 132
"""Programs of a launch: one for each multiprocessor of an H100 or H200."""

_SHARED_BYTES, _OTHER_BYTES = 227 * 1024, 2 * 1024
_MAX_STAGES = 12
_FEW_ROWS = (8, 16, 32)
# With up to this share of a block's rows on average, few experts need a second block, which reads their
# weights again, though from the cache.
_FILL = 0.5


@dataclass(frozen=True)
class ExpertTile:
    """Work of one item of a program.

    Attributes:
      rows: most rows of x; with `swapped` 8 to 256, otherwise a multiple of 64.
      columns: columns of the result, a multiple of 64. A gated product has two columns of weights for each.
      num_stages: blocks of x and w in shared memory, 2 or more.
      swapped: whether weights are the rows of the matrix instruction, not tokens.
      block_k: elements along the sum of a block, a multiple of 64.
    """

    rows: int
    columns: int
    num_stages: int
    swapped: bool
    block_k: int = SWIZZLED

    @property
    def num_warpgroups(self) -> int:
        """Number of warpgroups that multiply."""
        return (self.columns if self.swapped else self.rows) // INSTRUCTION_ROWS

    def stage_bytes(self, *, gated: bool) -> int:
        """Return the bytes of a stage of the ring."""
        return 2 * self.block_k * (self.rows + self.columns * (1 + gated))

    def shared_bytes(self, *, gated: bool) -> int:
        """Return the bytes of shared memory of a program."""
        return self.num_stages * self.stage_bytes(gated=gated) + 2 * self.rows * self.columns + _OTHER_BYTES

    def fits(self, *, gated: bool) -> bool:
        """Return whether the sizes are whole, and shared memory has room for all stages."""
        whole = self.columns % SWIZZLED == 0 and self.block_k % SWIZZLED == 0 and self.num_stages > 1
        rows = self.rows % (8 if self.swapped else INSTRUCTION_ROWS) == 0 and 0 < self.rows <= 256
        return (
            whole
            and rows
            and 1 <= self.num_warpgroups <= 2
            and self.shared_bytes(gated=gated) <= _SHARED_BYTES
        )

    def divides(self, depth: int, width: int) -> bool:
        """Return whether the tile divides a product of `width` columns over `depth` elements."""
        return depth % self.block_k == 0 and width % self.columns == 0


class Products(NamedTuple):
    """Tiles of both products; their blocks have the same rows."""

    gate_up: ExpertTile
    down: ExpertTile


def block_rows(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a block for this many (token, expert) pairs: 8, 16, 32, 64 or 128.

    It depends on the sizes alone, so that one program serves every batch of a bucket.
    """
    average = num_pairs / num_experts
    few = next((rows for rows in _FEW_ROWS if average <= _FILL * rows), None)
    if few is not None:
        return few
    return INSTRUCTION_ROWS if average <= INSTRUCTION_ROWS else 2 * INSTRUCTION_ROWS


def default_products(rows: int, hidden_size: int, width: int) -> Products | None:
    """Return the tiles for blocks of `rows` rows; None if 64 does not divide both sizes of an expert."""
    gate_up = _default_tile(rows, hidden_size, width, gated=True)
    down = _default_tile(rows, width, hidden_size, gated=False)
    return None if gate_up is None or down is None else Products(gate_up, down)


def _default_tile(rows: int, depth: int, width: int, *, gated: bool) -> ExpertTile | None:
    """Return the tile of one product with as many stages as fit."""
    swapped = rows <= _FEW_ROWS[-1]
    columns = SWIZZLED if swapped or width % (2 * SWIZZLED) else 2 * SWIZZLED
    block_k = 2 * SWIZZLED if swapped and depth % (2 * SWIZZLED) == 0 else SWIZZLED
    if width % columns or depth % block_k:
        return None
    return with_long_ring(ExpertTile(rows, columns, 2, swapped, block_k), gated=gated)


def with_long_ring(tile: ExpertTile, *, gated: bool) -> ExpertTile:
    """Return the tile with as many stages as shared memory holds, at most 12."""
    rest = _SHARED_BYTES - _OTHER_BYTES - 2 * tile.rows * tile.columns
    return dataclasses.replace(tile, num_stages=min(rest // tile.stage_bytes(gated=gated), _MAX_STAGES))
