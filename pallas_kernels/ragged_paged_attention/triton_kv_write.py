"""Write of new keys and values as int8 through Pallas' Triton back end, for NVIDIA GPUs from Ampere on.

Owns: one kernel. Does not know: which sequence a page belongs to. Called by: `kv_write`.
Upstream has deprecated this back end, so nothing outside this file imports from it.

XLA needs a reduction and three scatters per layer, and each takes longer to launch than to run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.page_formats import encode, scale_bytes, scale_places


def triton_write_kv(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, page_size: int, interpret: bool
) -> jax.Array:
    """See `kv_write.write_kv`; arguments are already checked, and head_dim is a power of two."""
    manual = jax.typeof(kv_pages).manual_axis_type
    written: jax.Array = pl.pallas_call(
        functools.partial(_kernel, page_size=page_size),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype, manual_axis_type=manual),
        grid=k.shape[:2],
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="write_kv_int8",
    )(slots, k, v, kv_pages)
    return written


def _kernel(slots_ref: Any, k_ref: Any, v_ref: Any, _aliased: Any, pool_ref: Any, *, page_size: int) -> None:
    """Write the key and value of one token and one KV head."""
    token, head = pl.program_id(0), pl.program_id(1)
    slot = slots_ref[token]
    page, offset = jax.lax.div(slot, page_size), jax.lax.rem(slot, page_size)

    @pl.when(page < pool_ref.shape[0])
    def store() -> None:
        for which, ref in enumerate((k_ref, v_ref)):
            row = 2 * head + which
            codes, scale = encode(ref[token, head, :], "int8")
            pool_ref[page, offset, row, :] = codes
            places = scale_places(offset, page_size, pool_ref.shape[3])
            for (place, lane), byte in zip(places, scale_bytes(scale), strict=True):
                pool_ref[page, place, row, lane] = byte
