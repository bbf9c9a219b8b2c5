"""Ring attention in plain XLA, for any device; and attention with any mask, several queries per row.

Owns: the order of operations, on which results on a CPU depend to the last bit.
Does not know: the kernel, or why a column is hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_MASKED = -1e30


def xla_ring_decode(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    place: jax.Array,
    num_columns: jax.Array,
    *,
    sm_scale: float,
) -> jax.Array:
    """See `api.ring_decode_attention`; arguments are already checked. This reads the whole ring."""
    batch, num_kv_heads, length, head_dim = keys.shape
    age = (place - jnp.arange(length)) % length
    visible = age < num_columns[:, None, None]
    rows = q.reshape(batch, 1, num_kv_heads, -1, head_dim)
    out = masked_attention(rows, keys, values, visible, sm_scale=sm_scale)
    return out.reshape(q.shape).astype(q.dtype)


def masked_attention(
    rows: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, *, sm_scale: float
) -> jax.Array:
    """Return the attention of Q queries per row over the row's L columns.

    Scores are masked with a finite number, so hidden keys and values must be finite.

    Args:
      rows: queries, [B, Q, num_kv_heads, group, head_dim].
      keys: [B, num_kv_heads, L, head_dim].
      values: as keys.
      visible: bool[B, Q, L], or a shape that broadcasts to this.
      sm_scale: factor on the scores.

    Returns:
      float32, like `rows`.
    """
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
    scores = jnp.einsum(
        "bqkgd,bkld->bkgql", rows, keys, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[:, None, None], scores * sm_scale, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum(
        "bkgql,bkld->bqkgd", weights, values, precision=precision, preferred_element_type=jnp.float32
    )
