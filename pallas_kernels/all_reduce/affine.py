"""Bias and scale arrays that apply to every row of a sum and of its norm.

Owns: the names of the arrays. Does not know: how sums or norms are computed.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax

_Row = Annotated[jax.Array, "f[width]"]


class Affine(NamedTuple):
    """Arrays of [width]; None means no addition, or a scale of one."""

    sum_bias: _Row | None = None  # added to the sum, in its dtype; the result is rounded to it again
    scale: _Row | None = None  # the norm's
    bias: _Row | None = None  # the norm's
