"""Bias and scale arrays that apply to every row of a sum and of its norm.

Owns: the names of the arrays. Does not know: how sums or norms are computed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class Affine(NamedTuple):
    """Arrays of [width]; None means no addition, or a scale of one."""

    sum_bias: jax.Array | None = None  # added to the sum, in its dtype; the result is rounded to it again
    scale: jax.Array | None = None  # the norm's
    bias: jax.Array | None = None  # the norm's
