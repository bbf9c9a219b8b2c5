"""The comparison of masses for top-p, in one place, so that all back ends round alike.

Owns: how masses are split and summed, and how a sum becomes the float that is compared.
Does not know: how a cutoff is searched for. Called by: both back ends.

A mass has up to 2**24 units. Its two halves are summed separately, as integers. These sums are exact in any
order and need 32 bits for up to 2**19 ids. Only the two sums become floats, so rounding does not depend on
the order either. Every step is monotonic, so adding ids never makes a sufficient sum insufficient.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

MASS_BITS = 24
MASS_LOW_BITS = 12
MAX_VOCAB_SIZE = 2**19


def halves(masses: Any) -> tuple[Any, Any]:
    """Return the high and the low 12 bits; the high half of 2**24 itself is 2**12."""
    return masses >> np.uint32(MASS_LOW_BITS), masses & np.uint32(2**MASS_LOW_BITS - 1)


def total_mass(high: Any, low: Any) -> Any:
    """Return the total as f32 of the same shape, from the sums of both halves."""
    return high.astype(jnp.float32) * 2.0**MASS_LOW_BITS + low.astype(jnp.float32)


def wanted_mass(top_p: Any, total: Any) -> Any:
    """Return the least sufficient part of `total`; at least one unit must be kept."""
    return jnp.maximum(top_p * total, 1.0)
