"""Addition and norm in plain XLA, for any device; the kernel uses its derivative.

Owns: the order of operations, on which results on a CPU depend to the last bit.
Does not know: the kernel. Called by: `api`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.residual_norms.specs import NormSpec


def xla_add_and_norm(
    x: jax.Array, y: jax.Array | None, scale: jax.Array | None, bias: jax.Array | None, spec: NormSpec
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_and_norm`; arguments are already checked."""
    x = x if y is None else x + y
    wide = x
    if spec.kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + spec.eps)
    if scale is not None:
        wide = wide * scale.astype(jnp.float32)
    if bias is not None:
        wide = wide + bias.astype(jnp.float32)
    return x, wide.astype(spec.dtype)
