"""Static arguments of a norm, and how a program of the kernel holds its row.

Owns: the two kinds of norm, and the block sizes.
Does not know: how any back end works.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp

NormKind = Literal["rms", "layer"]
KINDS: tuple[NormKind, ...] = ("rms", "layer")
MAX_WIDTH = 16384  # one program's registers hold a row

_MIN_LANES = 128  # narrower pieces cost more than the mask that they avoid
_MAX_LANES = 1024


class NormSpec(NamedTuple):
    """Static description of one norm; hashable."""

    kind: NormKind
    eps: float
    dtype: jnp.dtype  # dtype of the normed rows


class RowBlock(NamedTuple):
    """Layout of a row in a program: pieces of `lanes` elements, a power of two, over `num_warps` warps."""

    lanes: int
    num_warps: int


def row_block(width: int) -> RowBlock:
    """Return the block for rows of `width` elements.

    Triton's arrays are powers of two, and most hidden sizes are not. One array for 5120 elements would have
    8192, with more than a third of the lanes idle. Five pieces of 1024 need no mask.
    """
    divisor = width & -width
    lanes = divisor if divisor >= _MIN_LANES else 1 << (width - 1).bit_length()
    lanes = min(lanes, _MAX_LANES)
    # Two elements of a piece for each thread. On an H200 one row of 5120 or 128 rows take 3.5 us, and 2,048
    # rows 34 us. With a half or a quarter of the warps some number of rows takes 10% to 25% more.
    return RowBlock(lanes, max(1, min(16, lanes // 64)))
