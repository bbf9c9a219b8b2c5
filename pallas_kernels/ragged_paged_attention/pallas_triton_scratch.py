"""Decoding of pages in 8 bits into a 16-bit pool, through Pallas' Triton back end.

Owns: one kernel. Does not know: which pages are decoded (`scratch_lists`), or what reads the pool.
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
    scale_places,
    scales_of_bytes,
)
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_DECODED, TileSpec

# Programs, about as many as run at once on an H200; each decodes several pages if there are more.
_NUM_PROGRAMS = 2640


def decode_pages(
    spec: TileSpec, kv_pages: jax.Array, tiles: jax.Array, *, dtype: Any, interpret: bool
) -> jax.Array:
    """Return a pool [scratch_pages, page_size, 2 * num_kv_heads, head_dim] of the pages that `tiles` lists.

    Its other pages are not written.

    Args:
      spec: a spec with a scratch pool.
      kv_pages: i8[num_pages, page_rows, 2 * num_kv_heads, head_dim].
      tiles: i32[spec.tiles_len].
      dtype: dtype of the pool.
      interpret: run in interpret mode.
    """
    num_combined, head_dim = kv_pages.shape[2:]
    num_rows = spec.scratch_pages * spec.page_size * num_combined
    shape = jax.ShapeDtypeStruct(
        (num_rows, head_dim), dtype, manual_axis_type=jax.typeof(kv_pages).manual_axis_type
    )
    num_programs = min(spec.scratch_pages, -(-_NUM_PROGRAMS // spec.num_kv_heads))
    pool = pl.pallas_call(
        functools.partial(_kernel, spec=spec, num_programs=num_programs),
        out_shape=shape,
        grid=(num_programs, spec.num_kv_heads),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="decode_pages",
    )(tiles, kv_pages.reshape(-1, head_dim))
    return pool.reshape(spec.scratch_pages, spec.page_size, num_combined, head_dim)


def _kernel(tiles_ref: Any, kv_ref: Any, out_ref: Any, *, spec: TileSpec, num_programs: int) -> None:
    """Decode the keys and values of one KV head in every page of this program."""
    program, head = pl.program_id(0), pl.program_id(1)
    page_size, head_dim, kv_dtype = spec.page_size, kv_ref.shape[1], spec.kv_dtype
    assert kv_dtype is not None
    page_rows, num_combined = spec.page_rows(head_dim), 2 * spec.num_kv_heads
    offsets, lanes = jnp.arange(page_size), jnp.arange(head_dim)[None, :]
    num_pages = tiles_ref[NUM_DECODED]

    def decode(i: Any, _: None) -> None:
        slot = program + i * num_programs
        first = tiles_ref[spec.decoded_offset + slot] * page_rows
        for which in range(2):
            own = 2 * head + which

            def at(rows: Any, own: Any = own) -> Any:
                return (first + rows) * num_combined + own

            codes = plgpu.load(kv_ref.at[at(offsets)[:, None], lanes])
            places = scale_places(offsets, page_size, head_dim)
            high, low = [plgpu.load(kv_ref.at[at(rows), lane]) for rows, lane in places]
            scales = scales_of_bytes(high, low) * code_factor(kv_dtype)
            numbers = code_numbers(codes, kv_dtype).astype(jnp.float32) * scales[:, None]
            target = (slot * page_size + offsets) * num_combined + own
            plgpu.store(out_ref.at[target[:, None], lanes], numbers.astype(out_ref.dtype))

    jax.lax.fori_loop(0, jax.lax.div(num_pages - program + num_programs - 1, num_programs), decode, None)
