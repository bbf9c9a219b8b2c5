"""What every row of a sum is added to and multiplied with, the same for all rows.

Owns: the arrays' names. Does not know: sums, or norms.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class Affine(NamedTuple):
    """Arrays of [width]; None is no addition, or a scale of one."""

    sum_bias: jax.Array | None = None  # of the sum, in its dtype, and rounded to it again
    scale: jax.Array | None = None  # of the norm
    bias: jax.Array | None = None  # of the norm
