"""Write of new keys and values to one layer's pool of pages.

Owns: the order of K and V inside a page. Does not know: which sequence a page belongs to; slots come from the
planner.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.page_formats import (
    encode,
    num_scale_rows,
    scale_bytes,
    scale_places,
)


def write_kv(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    page_size: int | None = None,
    kv_dtype: str | None = None,
    backend: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """Scatter the keys and values of new tokens into the pool, in place if the pool is donated.

    Args:
      kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim]; K at even, V at odd heads. With a
        `kv_dtype`, i8 with rows of scales after those of the tokens; see `page_formats`.
      k: [num_tokens, num_kv_heads, head_dim].
      v: [num_tokens, num_kv_heads, head_dim].
      slots: i32[num_tokens], page * page_size + offset. A slot at or past num_pages * page_size is padding
        and is dropped; the others must differ from each other and not be negative.
      page_size: tokens of a page; None means that every row of a page is a token.
      kv_dtype: format of the pages; None means the pool's dtype.
      backend: back end of the attention that reads them. With one of Pallas', a kernel writes int8.
      interpret: run this kernel without a GPU, slowly.

    Returns:
      The pool with the new rows; every other element is unchanged.

    Raises:
      AttentionArgumentError: shapes do not match.
    """
    _, num_rows, num_combined_heads, head_dim = kv_pages.shape
    page_size = num_rows if page_size is None else page_size
    if num_rows != page_size + num_scale_rows(kv_dtype, page_size, head_dim):
        limit = f"must be pages of {page_size} tokens, stored as {kv_dtype or kv_pages.dtype.name}"
        raise AttentionArgumentError("kv_pages.shape", kv_pages.shape, limit)
    num_tokens = slots.shape[0]
    expected = (num_tokens, num_combined_heads // 2, head_dim)
    for name, value in (("k", k), ("v", v)):
        if value.shape != expected:
            raise AttentionArgumentError(
                f"{name}.shape", value.shape, f"must be {expected} for these pages and slots"
            )
    if kv_dtype == "int8" and backend in ("pallas_triton", "pallas_mosaic_gpu"):
        # Imported late: upstream has deprecated this back end, and only its own file may depend on it.
        from pallas_kernels.ragged_paged_attention.triton_kv_write import triton_write_kv

        return triton_write_kv(kv_pages, k, v, slots, page_size=page_size, interpret=interpret)
    rows = jnp.stack([k, v], axis=2).reshape(num_tokens, num_combined_heads, head_dim)
    # Page and offset stay two indices: one flat index may exceed 32 bits, but neither of these does.
    pages, offsets = slots // page_size, slots % page_size
    if kv_dtype is None:
        return kv_pages.at[pages, offsets].set(rows.astype(kv_pages.dtype), mode="drop", unique_indices=True)
    return _write_codes(kv_pages, rows, pages, offsets, page_size, kv_dtype)


def _write_codes(
    kv_pages: jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    page_size: int,
    kv_dtype: str,
) -> jax.Array:
    """Return the pool with `rows` [num_tokens, 2 * num_kv_heads, head_dim] written as codes and scales."""
    _, _, num_combined_heads, head_dim = kv_pages.shape
    codes, scales = encode(rows, kv_dtype)
    written = kv_pages.at[pages, offsets].set(codes, mode="drop", unique_indices=True)
    # All four indices, in order: for a scatter over only some of them XLA may transpose the whole pool.
    heads = jnp.arange(num_combined_heads)[None, :]
    places = scale_places(offsets, page_size, head_dim)
    for (row, lane), values in zip(places, scale_bytes(scales), strict=True):
        place = pages[:, None], row[:, None], heads, lane[:, None]
        written = written.at[place].set(values, mode="drop", unique_indices=True)
    return written
