"""Ragged paged attention in plain Triton through jax-triton, for NVIDIA GPUs from Ampere on.

Owns: the launches of `jax_triton_kernels`: one for each tile class, and the merge.
Does not know: how tiles are chosen (`tile_lists`), or what the kernels do. Called by: `api`.

It is the fallback if Pallas drops its Triton back end: same tile lists, same block sizes, no Pallas.
"""

from __future__ import annotations

import math

import jax
import jax_triton

from pallas_kernels.ragged_paged_attention import jax_triton_kernels as kernels
from pallas_kernels.ragged_paged_attention.tile_specs import TileSpec, result_shapes

# PTX 8.8 is that of CUDA 12.9. JAX assembles Triton's output with the CUDA version it runs on, which may be
# older than Triton's own. Fusion is set since Triton's default differs between versions.
_OPTIONS = {"ptx_version": 88, "enable_fp_fusion": True}


def jax_triton_attention(
    spec: TileSpec,
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    tiles: jax.Array,
    *,
    sm_scale: float,
) -> jax.Array:
    """See `api.ragged_paged_attention`; arguments are already checked, `tiles` is i32[spec.tiles_len]."""
    num_tokens, num_q_heads, head_dim = q.shape
    flat_q = q.reshape(num_tokens * num_q_heads, head_dim)
    inputs = (tiles, page_indices.reshape(-1), flat_q, kv_pages.reshape(-1, head_dim))
    buffers: list[jax.Array] = []
    for index, tile_class in enumerate(spec.blocks.classes):
        # A class writes only its own rows; later classes continue in the buffers of the first.
        refs = [jax.new_ref(buffer) for buffer in buffers]
        outputs = jax_triton.triton_call(
            *inputs,
            *refs,
            kernel=kernels.ragged_paged_attention_tiles,
            out_type=() if refs else result_shapes(spec, flat_q),
            grid=(spec.num_kv_heads, spec.max_num_tiles[index]),
            name=f"ragged_paged_attention_{tile_class.rows}",
            num_warps=tile_class.num_warps,
            num_stages=tile_class.num_stages,
            backend_options=_OPTIONS,
            class_index=index,
            first_tile=spec.tiles_offset(index),
            first_partial_row=spec.partial_begin(index),
            pages_per_seq=page_indices.shape[1],
            scale=sm_scale * math.log2(math.e),
            num_kv_heads=spec.num_kv_heads,
            group=spec.group,
            head_dim=head_dim,
            page_size=spec.page_size,
            num_rows=tile_class.rows,
            block_kv=tile_class.block_kv,
            whole_loop=tile_class.whole_loop,
        )
        buffers = [jax.freeze(ref) for ref in refs] or list(outputs)
    out, partial_out, partial_lse = buffers
    return _merge(spec, tiles, out, partial_out, partial_lse).reshape(q.shape)


def _merge(
    spec: TileSpec, tiles: jax.Array, out: jax.Array, partial_out: jax.Array, partial_lse: jax.Array
) -> jax.Array:
    """Return `out` with the rows of split tiles filled in."""
    num_classes = len(spec.blocks.classes)
    out_ref = jax.new_ref(out)
    jax_triton.triton_call(
        tiles,
        partial_out,
        partial_lse,
        out_ref,
        kernel=kernels.ragged_paged_attention_merge,
        out_type=(),
        grid=(spec.num_kv_heads, spec.max_num_merges),
        name="ragged_paged_attention_merge",
        num_warps=4,
        num_stages=1,
        backend_options=_OPTIONS,
        num_classes=num_classes,
        first_merge=spec.tiles_offset(num_classes),
        num_kv_heads=spec.num_kv_heads,
        group=spec.group,
        head_dim=out.shape[1],
    )
    return jax.freeze(out_ref)
