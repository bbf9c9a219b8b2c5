"""Writing new keys and values into one layer's pool of pages.

Owns: the order of K and V inside a page. Does not know which page belongs to whom; slots come from the
planner. Called by: the models' attention wrapper, once per layer and step, before the attention itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError


def write_kv(kv_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """Scatters the keys and values of new tokens into the pool, in place where the pool is donated.

    Args:
      kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim]; K at even, V at odd heads.
      k: [num_tokens, num_kv_heads, head_dim].
      v: [num_tokens, num_kv_heads, head_dim].
      slots: i32[num_tokens], page * page_size + offset. A slot at or past num_pages * page_size is padding
        and is dropped; the others must differ from each other and not be negative.

    Returns:
      The pool with the new rows; every other element is unchanged.

    Raises:
      AttentionArgumentError: shapes that do not belong together.
    """
    _, page_size, num_combined_heads, head_dim = kv_pages.shape
    num_tokens = slots.shape[0]
    expected = (num_tokens, num_combined_heads // 2, head_dim)
    for name, value in (("k", k), ("v", v)):
        if value.shape != expected:
            raise AttentionArgumentError(
                f"{name}.shape", value.shape, f"must be {expected} for these pages and slots"
            )
    rows = jnp.stack([k, v], axis=2).reshape(num_tokens, num_combined_heads, head_dim)
    # Page and offset stay two indices: their product with the row size may exceed 32 bits, neither of them
    # does.
    return kv_pages.at[slots // page_size, slots % page_size].set(
        rows.astype(kv_pages.dtype), mode="drop", unique_indices=True
    )
