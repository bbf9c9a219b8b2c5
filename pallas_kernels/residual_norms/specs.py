"""What both back ends are told beside the arrays, and how a program of the kernel holds its row.

Owns: the two kinds of norm, and the block sizes.
Does not know: how any back end works.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp

NormKind = Literal["rms", "layer"]
KINDS: tuple[NormKind, ...] = ("rms", "layer")
MAX_WIDTH = 16384  # a row lies in one program's registers

_MIN_LANES = 128  # narrower pieces are not worth going without a mask
_MAX_LANES = 1024


class NormSpec(NamedTuple):
    """One norm without its arrays; hashable."""

    kind: NormKind
    eps: float
    dtype: jnp.dtype  # of the normed rows


class RowBlock(NamedTuple):
    """How a program holds a row: in pieces of `lanes` elements, a power of two, over `num_warps` warps."""

    lanes: int
    num_warps: int


def row_block(width: int) -> RowBlock:
    """The block for rows of `width` elements.

    Triton's arrays are powers of two, and most hidden sizes are not: 5120 as one array would be 8192, with
    more than a third of the lanes idle. As five pieces of 1024 it needs no mask.
    """
    divisor = width & -width
    lanes = divisor if divisor >= _MIN_LANES else 1 << (width - 1).bit_length()
    lanes = min(lanes, _MAX_LANES)
    # Two elements of a piece for each thread. On an H200 rows of 5120 take 3.5 us so, 128 of them or one, and
    # 34 us if they are 2,048; with half or a quarter of the warps some number of rows takes 10% to 25% more.
    return RowBlock(lanes, max(1, min(16, lanes // 64)))
