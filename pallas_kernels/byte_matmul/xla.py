"""The product in plain XLA: the reference of the kernel's tests, and what serves all other shapes.

Owns: the formula. Does not know: which of the two is faster.

Codes become numbers of x's dtype, which holds all of them exactly, in the fusion of the product, so that no
array of weights in 16 bits is made. The scale follows the sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def xla_byte_matmul(
    x: jax.Array, codes: jax.Array, scale: jax.Array, bias: jax.Array | None, *, gate: str | None, relu: bool
) -> jax.Array:
    """See `api.byte_matmul`; computed in float32 and rounded once."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = ((1,), (1,)), ((), ())
    y = lax.dot_general(
        x, codes.astype(x.dtype), contract, precision=precision, preferred_element_type=jnp.float32
    )
    y = y * scale
    if gate is not None:
        first, up = jnp.split(y, 2, axis=1)
        y = (jax.nn.silu(first) if gate == "silu" else jax.nn.gelu(first, approximate=True)) * up
    if bias is not None:
        y += bias.astype(jnp.float32)
    if relu:
        y = jax.nn.relu(y)
    return y.astype(x.dtype)
