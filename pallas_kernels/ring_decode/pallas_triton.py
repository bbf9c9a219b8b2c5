"""Ring attention through Pallas' Triton back end, for NVIDIA GPUs from Ampere on.

Owns: the bodies and launches of two kernels: attention over a part of a row's columns, and the merge of the
parts. Does not know: which query a row belongs to. Called by: `api`.
Upstream has deprecated this back end: `triton_parts` says which files import from it.

A program computes one part of one row's columns for one KV head, whose query heads are the rows of one
matrix. It counts columns from the row's oldest one; the place of a column is a sum, less the ring's length
past its end. Each iteration gathers `block_kv` columns by row address, so the ring may wrap anywhere in it.
Parts follow from the row's length: a short row has few columns in each part, and none in the last parts,
whose programs return at once. Nothing outside the window is read, so it cannot affect the sums.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import triton_parts
from pallas_kernels.ring_decode.blocks import DecodeBlock
from pallas_kernels.triton_parts import dot

# Finite and far apart, as in `ragged_paged_attention`, so that weights of hidden scores are exactly zero.
_MASKED, _NO_MAXIMUM = -1e30, -1e29
_MIN_ROWS = 16  # least rows of a product's left operand
# Parts are multiples of this many columns: narrower ones would leave lanes of a product idle.
_PART_COLUMNS = 16
_MERGE_WARPS = 4


@functools.partial(jax.jit, static_argnames=("sm_scale", "block", "interpret"))  # lowered once for all layers
def triton_ring_decode(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    place: jax.Array,
    num_columns: jax.Array,
    *,
    sm_scale: float,
    block: DecodeBlock,
    interpret: bool,
) -> jax.Array:
    """See `api.ring_decode_attention`; arguments are already checked."""
    batch, num_kv_heads, length, head_dim = keys.shape
    num_q_heads, num_splits = q.shape[1], block.num_splits
    # Rows of head_dim elements: a 32-bit row number addresses any ring, and only the offset needs 64 bits.
    flat_q, flat_keys, flat_values = (one.reshape(-1, head_dim) for one in (q, keys, values))
    out = _like(flat_q, flat_q.shape, q.dtype)
    parts = [
        _like(flat_q, (len(flat_q) * num_splits, head_dim), jnp.float32),
        _like(flat_q, (len(flat_q) * num_splits,), jnp.float32),
    ]
    kernel = functools.partial(
        _attention_kernel, num_kv_heads=num_kv_heads, group=num_q_heads // num_kv_heads, length=length,
        scale=sm_scale * math.log2(math.e), block=block, interpret=interpret,
    )  # fmt: skip
    found = pl.pallas_call(
        kernel,
        out_shape=[out] if num_splits == 1 else parts,
        grid=(num_kv_heads, num_splits, batch),
        compiler_params=plgpu.CompilerParams(num_warps=block.num_warps, num_stages=block.num_stages),
        interpret=interpret,
        name=f"ring_decode_{block.block_kv}",
    )(place.reshape(1), num_columns, flat_q, flat_keys, flat_values)
    if num_splits == 1:
        return found[0].reshape(q.shape)
    merged = pl.pallas_call(
        functools.partial(_merge_kernel, length=length, num_splits=num_splits, interpret=interpret),
        out_shape=out,
        grid=(num_q_heads, batch),
        compiler_params=plgpu.CompilerParams(num_warps=_MERGE_WARPS, num_stages=1),
        interpret=interpret,
        name="ring_decode_merge",
    )(num_columns, *found)
    return merged.reshape(q.shape)


def _attention_kernel(
    place_ref: Any,
    num_columns_ref: Any,
    q_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    *out_refs: Any,
    num_kv_heads: int,
    group: int,
    length: int,
    scale: float,
    block: DecodeBlock,
    interpret: bool,
) -> None:
    """Compute one part of one row and KV head.

    `out_refs` is the result; with several parts, the parts' results and log-sum-exps.
    """
    head, part, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    block_kv, head_dim = block.block_kv, q_ref.shape[1]
    num_rows = max(_MIN_ROWS, pl.next_power_of_2(group))
    exp2 = functools.partial(triton_parts.exp2, interpret=interpret)
    num_columns = _columns_of(num_columns_ref, row, length)
    size = _part_size(num_columns, block.num_splits)
    begin = part * size
    end = jnp.minimum(begin + size, num_columns)

    @pl.when(begin < end)
    def attend() -> None:
        ring = (row * num_kv_heads + head) * length
        oldest = place_ref[0] + 1 - num_columns
        oldest = jnp.where(oldest < 0, oldest + length, oldest)
        rows = jnp.arange(num_rows)
        lanes = jnp.arange(head_dim)[None, :]
        is_row = rows < group
        q_rows = (row * num_kv_heads + head) * group + rows
        q = plgpu.load(q_ref.at[q_rows[:, None], lanes], mask=is_row[:, None], other=0.0)

        def step(i: Any, carry: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
            m, total, acc = carry
            columns = begin + i * block_kv + jnp.arange(block_kv)
            places = oldest + columns
            kv_rows = ring + jnp.where(places >= length, places - length, places)
            is_there = columns < end
            load = functools.partial(triton_parts.load, mask=is_there[:, None] if masked else None)
            scores = dot(q, load(keys_ref.at[kv_rows[:, None], lanes]), contract_b=1)
            if masked:
                scores = jnp.where(is_there[None, :], scores, _MASKED)
            m_new = jnp.maximum(m, scores.max(axis=1))
            # The scale is positive, so it may be applied after the maximum, as one multiply-add.
            weights = exp2(scores * scale - (m_new * scale)[:, None])
            alpha = exp2((m - m_new) * scale)
            values = load(values_ref.at[kv_rows[:, None], lanes])
            acc = acc * alpha[:, None] + dot(weights.astype(values.dtype), values, contract_b=0)
            return m_new, total * alpha + weights.sum(axis=1), acc

        carry = (
            jnp.full((num_rows,), _NO_MAXIMUM, jnp.float32),
            jnp.zeros((num_rows,), jnp.float32),
            jnp.zeros((num_rows, head_dim), jnp.float32),
        )
        num_whole: Any = 0
        if block.whole_loop:
            num_whole = jax.lax.div(end - begin, block_kv)
            carry = jax.lax.fori_loop(0, num_whole, functools.partial(step, masked=False), carry)
        num_blocks = jax.lax.div(end - begin + block_kv - 1, block_kv)
        m, total, acc = jax.lax.fori_loop(num_whole, num_blocks, functools.partial(step, masked=True), carry)
        acc = acc / total[:, None]  # every part has a column, so no sum is zero
        out_rows = q_rows * block.num_splits + part
        out = acc.astype(out_refs[0].dtype)
        plgpu.store(out_refs[0].at[out_rows[:, None], lanes], out, mask=is_row[:, None])
        if block.num_splits > 1:
            plgpu.store(out_refs[1].at[out_rows], m * scale + jnp.log2(total), mask=is_row)


def _merge_kernel(
    num_columns_ref: Any,
    part_out_ref: Any,
    part_lse_ref: Any,
    out_ref: Any,
    *,
    length: int,
    num_splits: int,
    interpret: bool,
) -> None:
    """Store the weighted mean of the parts of one row, for one query head."""
    head, row = pl.program_id(0), pl.program_id(1)
    exp2 = functools.partial(triton_parts.exp2, interpret=interpret)
    num_columns = _columns_of(num_columns_ref, row, length)
    parts = jnp.arange(pl.next_power_of_2(num_splits))
    is_there = parts * _part_size(num_columns, num_splits) < num_columns  # the other parts were not written
    out_row = row * pl.num_programs(0) + head
    part_rows = out_row * num_splits + parts
    lanes = jnp.arange(out_ref.shape[1])
    lse = plgpu.load(part_lse_ref.at[part_rows], mask=is_there, other=_MASKED)
    weights = exp2(lse - lse.max())
    part_out = plgpu.load(
        part_out_ref.at[part_rows[:, None], lanes[None, :]], mask=is_there[:, None], other=0.0
    )
    out = (part_out * weights[:, None]).sum(axis=0) / weights.sum()
    plgpu.store(out_ref.at[jnp.full(lanes.shape, out_row), lanes], out.astype(out_ref.dtype))


def _columns_of(num_columns_ref: Any, row: Any, length: int) -> Any:
    """Return the number of columns of a row, clipped to 1 ... `length`."""
    return jnp.minimum(jnp.maximum(num_columns_ref[row], 1), length)


def _part_size(num_columns: Any, num_splits: int) -> Any:
    """Return the columns of a part; the last part that has any may have fewer."""
    return jax.lax.div(num_columns - 1, num_splits * _PART_COLUMNS) * _PART_COLUMNS + _PART_COLUMNS


def _like(array: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)
