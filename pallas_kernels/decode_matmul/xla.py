"""The product in plain XLA: the reference of the kernel's tests, and the fallback for all other shapes.

Owns: the formula. Does not know: which of the two is faster. Called by: `api`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def xla_decode_matmul(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, gate: str | None, relu: bool
) -> jax.Array:
    """See `api.decode_matmul`; computed in float32 and rounded once."""
    y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    if gate is not None:
        first, up = jnp.split(y, 2, axis=1)
        y = (jax.nn.silu(first) if gate == "silu" else jax.nn.gelu(first, approximate=True)) * up
    if bias is not None:
        y += bias.astype(jnp.float32)
    if relu:
        y = jax.nn.relu(y)
    return y.astype(x.dtype)
