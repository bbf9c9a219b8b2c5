"""Public call of ring attention: argument checks, choice of a back end, dispatch.

Owns: the checks of arguments that no back end supports, and the dispatch.
Does not know: the limits of a back end (`backends` does), or how it works.
"""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.backends import AttentionHeads
from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError
from pallas_kernels.ring_decode.backends import choose_backend
from pallas_kernels.ring_decode.blocks import MAX_NUM_SPLITS, MIN_BLOCK_KV, DecodeBlock, default_block
from pallas_kernels.ring_decode.xla import xla_ring_decode


def ring_decode_attention(
    q: Annotated[jax.Array, "f[B, num_q_heads, head_dim]"],
    keys: Annotated[jax.Array, "f[B, num_kv_heads, L, head_dim]"],
    values: Annotated[jax.Array, "f[B, num_kv_heads, L, head_dim]"],
    place: Annotated[jax.Array, "i32[]"],
    num_columns: Annotated[jax.Array, "i32[B]"],
    *,
    sm_scale: float,
    backend: str = "auto",
    block: DecodeBlock | None = None,
    interpret: bool = False,
) -> Annotated[jax.Array, "f[B, num_q_heads, head_dim]"]:
    """Return the attention of one query per row over the row's contiguous columns, which end at the newest.

    Row b sees the columns at places (place - num_columns[b], place], modulo the ring's length. Other columns
    may hold any finite numbers. `pallas_triton` does not read them, so with it they may also be NaN.

    Args:
      q: [B, num_q_heads, head_dim].
      keys: [B, num_kv_heads, L, head_dim], q's dtype; a column is at its number modulo L.
      values: as keys.
      place: i32[], place of the newest column, the last one of every row.
      num_columns: i32[B], from 1 to L.
      sm_scale: factor on the scores, positive.
      backend: "auto" selects the fastest that supports these heads on the first device.
      block: block of `pallas_triton`; None chooses it by shape and by the first device.
      interpret: run the Triton kernel without a GPU, slowly.

    Returns:
      The result, like q; accumulated in float32.

    Raises:
      AttentionArgumentError: no back end supports the arguments, or the selected one does not.
    """
    _check(q, keys, values, place, num_columns)
    if not (math.isfinite(sm_scale) and sm_scale > 0):
        raise AttentionArgumentError("sm_scale", sm_scale, "must be positive and finite")
    batch, num_kv_heads, length, head_dim = keys.shape
    backend = choose_backend(backend, AttentionHeads(q.shape[1], num_kv_heads, head_dim, q.dtype)).name
    if backend == "xla":
        return xla_ring_decode(q, keys, values, place, num_columns, sm_scale=sm_scale)
    block = block or default_block(
        batch=batch,
        num_kv_heads=num_kv_heads,
        length=length,
        head_dim=head_dim,
        itemsize=q.dtype.itemsize,
    )
    _check_block(block)
    # Imported late: upstream has deprecated this back end, and only its own file may depend on it.
    from pallas_kernels.ring_decode.pallas_triton import triton_ring_decode

    return triton_ring_decode(
        q, keys, values, place, num_columns, sm_scale=sm_scale, block=block, interpret=interpret
    )


def _check(
    q: jax.Array, keys: jax.Array, values: jax.Array, place: jax.Array, num_columns: jax.Array
) -> None:
    if q.ndim != 3 or not q.size:
        raise AttentionArgumentError("q", _named(q), "must be [B, num_q_heads, head_dim], none of them 0")
    batch, _, head_dim = q.shape
    is_like_q = keys.ndim == 4 and (keys.shape[0], keys.shape[3], keys.dtype) == (batch, head_dim, q.dtype)
    if not (is_like_q and keys.size):
        limit = f"must be {q.dtype.name}[{batch}, num_kv_heads, L, {head_dim}] as q is, none of them 0"
        raise AttentionArgumentError("keys", _named(keys), limit)
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise AttentionArgumentError("values", _named(values), f"must be {_named(keys)} as keys are")
    for name, array, shape in (("place", place, ()), ("num_columns", num_columns, (batch,))):
        if array.shape != shape or array.dtype != jnp.int32:
            raise AttentionArgumentError(name, _named(array), f"must be int32{list(shape)}")


def _check_block(block: DecodeBlock) -> None:
    size = block.block_kv
    if size < MIN_BLOCK_KV or size & (size - 1):
        limit = f"must be a power of two, and {MIN_BLOCK_KV} or more"
        raise AttentionArgumentError("block.block_kv", size, limit)
    if not 1 <= block.num_splits <= MAX_NUM_SPLITS:
        raise AttentionArgumentError("block.num_splits", block.num_splits, f"must be 1 to {MAX_NUM_SPLITS}")


def _named(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
