"""The same product in plain XLA: what the kernel is tested against, and what serves everything else.

Owns: the formula. Does not know which of the two is faster.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def xla_decode_matmul(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, gated: bool, relu: bool
) -> jax.Array:
    """As `api.decode_matmul`; all of it in float32, rounded once."""
    y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    if gated:
        gate, up = jnp.split(y, 2, axis=1)
        y = jax.nn.silu(gate) * up
    if bias is not None:
        y += bias.astype(jnp.float32)
    if relu:
        y = jax.nn.relu(y)
    return y.astype(x.dtype)
