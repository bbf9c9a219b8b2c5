"""Decoding of the pages of some rows into a 16-bit pool, through Pallas' Triton back end.

Owns: one kernel. Does not know: what reads the pool. Called by: the benchmark of prompts.
Upstream has deprecated this back end, so nothing outside files of this name imports from it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.page_formats import (
    code_factor,
    code_numbers,
    num_scale_rows,
    scale_places,
    scales_of_bytes,
)


def decode_pages(
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    *,
    kv_dtype: str,
    page_size: int,
    dtype: Any,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return a pool of the rows' pages as `dtype`, and the rows' page indices in it.

    Pages past a row's keys are not written.

    Args:
      kv_pages: i8[num_pages, page_rows, 2 * num_kv_heads, head_dim].
      kv_lens: i32[max_num_seqs]; 0 for rows to leave out.
      page_indices: i32[max_num_seqs, pages_per_seq].
      kv_dtype: format of the pages.
      page_size: tokens of a page.
      dtype: dtype of the pool.
      interpret: run in interpret mode.
    """
    num_heads, head_dim = kv_pages.shape[2:]
    num_pages = page_indices.size
    shape = jax.ShapeDtypeStruct((num_pages * page_size * num_heads, head_dim), dtype)
    kernel = functools.partial(
        _kernel, kv_dtype=kv_dtype, page_size=page_size, num_heads=num_heads,
        pages_per_seq=page_indices.shape[1],
    )  # fmt: skip
    pool = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(num_pages, num_heads // 2),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="decode_pages",
    )(page_indices.reshape(-1), kv_lens, kv_pages.reshape(-1, head_dim))
    indices = jnp.arange(num_pages, dtype=jnp.int32).reshape(page_indices.shape)
    return pool.reshape(num_pages, page_size, num_heads, head_dim), indices


def _kernel(
    pages_ref: Any,
    lens_ref: Any,
    kv_ref: Any,
    out_ref: Any,
    *,
    kv_dtype: str,
    page_size: int,
    num_heads: int,
    pages_per_seq: int,
) -> None:
    """Decode the keys and values of one page and one KV head."""
    slot, head = pl.program_id(0), pl.program_id(1)
    row, column = jax.lax.div(slot, pages_per_seq), jax.lax.rem(slot, pages_per_seq)
    head_dim = kv_ref.shape[1]
    page_rows = page_size + num_scale_rows(kv_dtype, page_size, head_dim)

    @pl.when(column * page_size < lens_ref[row])
    def decode() -> None:
        offsets, lanes = jnp.arange(page_size), jnp.arange(head_dim)[None, :]
        first = pages_ref[slot] * page_rows
        for which in range(2):
            own = 2 * head + which

            def at(rows: Any, own: Any = own) -> Any:
                return (first + rows) * num_heads + own

            codes = plgpu.load(kv_ref.at[at(offsets)[:, None], lanes])
            places = scale_places(offsets, page_size, head_dim)
            high, low = [plgpu.load(kv_ref.at[at(rows), lane]) for rows, lane in places]
            scales = scales_of_bytes(high, low) * code_factor(kv_dtype)
            numbers = code_numbers(codes, kv_dtype).astype(jnp.float32) * scales[:, None]
            target = (slot * page_size + offsets) * num_heads + own
            plgpu.store(out_ref.at[target[:, None], lanes], numbers.astype(out_ref.dtype))
