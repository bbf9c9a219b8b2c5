"""What is enough for top-p, in one place, so that every back end rounds alike.

Owns: how masses are split and summed, and the float that a sum of them is compared as.
Does not know: how a cutoff is searched for.

A mass has up to 2**24 units. Its halves are summed apart, as integers: exact, in any order, and in 32 bits
for up to 2**19 ids. Only the two sums become floats, so that the comparison has no rounding order either;
and since each step of it is monotonous, whatever is enough stays so with more ids.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

MASS_BITS = 24
MASS_LOW_BITS = 12
MAX_VOCAB_SIZE = 2**19


def halves(masses: Any) -> tuple[Any, Any]:
    """The high and the low 12 bits; the high half of 2**24 itself is 2**12."""
    return masses >> np.uint32(MASS_LOW_BITS), masses & np.uint32(2**MASS_LOW_BITS - 1)


def total_mass(high: Any, low: Any) -> Any:
    """f32 of the same shape, from the sums of both halves."""
    return high.astype(jnp.float32) * 2.0**MASS_LOW_BITS + low.astype(jnp.float32)


def wanted_mass(top_p: Any, total: Any) -> Any:
    """The least sum that is enough of `total`; at least one unit has to be kept."""
    return jnp.maximum(top_p * total, 1.0)
