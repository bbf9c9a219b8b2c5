"""Ragged paged attention through Pallas' Triton back end, for NVIDIA GPUs from Ampere on.

Owns: the bodies and launches of two kernels: attention over the tiles of each class that is not Mosaic's, and
the merge of the split key ranges of all classes. Does not know: how tiles are chosen (`tile_lists`).
Called by: `api`. Upstream has deprecated this back end: `triton_parts` says which files import from it.

One program computes one tile for one KV head. The query heads of that KV head and the tile's tokens fold into
the rows of one matrix, whatever their number. Each iteration gathers `block_kv` keys by row address, so it
may span pages; page ids are read one iteration ahead. Blocks that every query sees entirely use a loop
without masks. The last few, partly hidden by causality or by the end of the range, use a loop with masks.
With a window, so do the first ones, in which the windows of the tile's tokens begin. Masks also keep the
contents of unused slots, and of pages before all windows, out of the sums, NaN included.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import triton_parts
from pallas_kernels.ragged_paged_attention.block_sizes import MAX_NUM_SPLITS, MERGE_ROWS
from pallas_kernels.ragged_paged_attention.page_formats import (
    code_factor,
    code_numbers,
    scale_places,
    scales_of_bytes,
)
from pallas_kernels.ragged_paged_attention.tile_lists import (
    KV_BEGIN,
    KV_END,
    MERGE_CLASS_ROWS,
    MERGE_FIRST_ROW,
    MERGE_NUM_SPLITS,
    MERGE_NUM_TOKENS,
    MERGE_PARTIAL,
    MERGE_TOKEN,
    NUM_TOKENS,
    POSITION,
    ROW,
    SLOT,
    TOKEN,
)
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_FIELDS, TileSpec, result_shapes
from pallas_kernels.triton_parts import dot, load

# Both are finite, so that nothing yields NaN. The maximum of a row that has seen no visible key is far above
# hidden scores, so that their weights are zero. If both were equal, weights would be exp2(0) in exact
# arithmetic, and exp2 of a rounding error of about 1e22 if a multiply-add is fused.
_MASKED, _NO_MAXIMUM = -1e30, -1e29
_LOG2_E = math.log2(math.e)
_MERGE_PARTS = 8  # loaded together: the merge is bound by latency
# Most programs of a merge, several for each multiprocessor. A step rarely has as many merges as its list has
# room for, and thousands of idle programs take longer than those that have work.
_MERGE_PROGRAMS = 1056


def triton_attention(
    spec: TileSpec,
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    tiles: jax.Array,
    *,
    sm_scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
    interpret: bool,
    buffers: list[jax.Array],
) -> jax.Array:
    """See `api.ragged_paged_attention`; arguments are already checked, `tiles` is i32[spec.tiles_len].

    buffers: the results of `mosaic_attention` for its classes; empty if there are none.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    # Rows of head_dim elements: a 32-bit row number addresses any pool, and only the offset needs 64 bits.
    flat_q = q.reshape(num_tokens * num_q_heads, head_dim)
    flat_kv = kv_pages.reshape(-1, head_dim)
    state = list(result_shapes(spec, flat_q))
    inputs = [tiles, page_indices.reshape(-1), flat_q, flat_kv, *([] if sinks is None else [sinks])]
    unscaled_softcap = None if softcap is None else softcap / sm_scale
    if buffers:
        buffers = [buffers[0].reshape(flat_q.shape), *buffers[1:]]
    for index, tile_class in enumerate(spec.blocks.classes):
        if tile_class.mosaic or tile_class.in_bytes:
            continue
        kernel = functools.partial(
            _attention_kernel, spec=spec, index=index, pages_per_seq=page_indices.shape[1],
            scale=sm_scale * _LOG2_E, unscaled_softcap=unscaled_softcap,
            has_sinks=sinks is not None, interpret=interpret,
        )  # fmt: skip
        # A class writes only its own rows; later classes continue in the buffers of the first.
        buffers = pl.pallas_call(
            kernel,
            out_shape=state,
            grid=(spec.num_kv_heads, spec.max_num_tiles[index]),
            input_output_aliases={len(inputs) + i: i for i in range(len(buffers))},
            compiler_params=plgpu.CompilerParams(
                num_warps=tile_class.num_warps, num_stages=tile_class.num_stages
            ),
            interpret=interpret,
            name=f"ragged_paged_attention_{tile_class.rows}",
        )(*inputs, *buffers)
    return _merge(spec, tiles, *buffers, sinks=sinks, interpret=interpret).reshape(q.shape)


def _merge(
    spec: TileSpec,
    tiles: jax.Array,
    out: jax.Array,
    partial_out: jax.Array,
    partial_lse: jax.Array,
    *,
    sinks: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """Return `out` with the rows of split tiles filled in."""
    inputs = [tiles, partial_out, partial_lse, *([] if sinks is None else [sinks])]
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=jax.typeof(out).manual_axis_type)
    return pl.pallas_call(
        functools.partial(_merge_kernel, spec=spec, interpret=interpret),
        out_shape=shape,
        grid=(spec.num_kv_heads, min(spec.max_num_merges, -(-_MERGE_PROGRAMS // spec.num_kv_heads))),
        input_output_aliases={len(inputs): 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="ragged_paged_attention_merge",
    )(*inputs, out)


def _attention_kernel(
    tiles_ref: Any,
    pages_ref: Any,
    q_ref: Any,
    kv_ref: Any,
    *other_refs: Any,
    spec: TileSpec,
    index: int,
    pages_per_seq: int,
    scale: float,
    unscaled_softcap: float | None,
    has_sinks: bool,
    interpret: bool,
) -> None:
    """Compute one tile for one KV head.

    `other_refs` are the sinks if there are any, the aliased inputs (unused) and the outputs.
    `unscaled_softcap` is the softcap of scores before they are scaled; None means none.
    """
    out_ref, partial_out_ref, partial_lse_ref = other_refs[-3:]
    tile_class = spec.blocks.classes[index]
    num_rows, block_kv, head_dim = tile_class.rows, tile_class.block_kv, q_ref.shape[1]
    group, page_size = spec.group, spec.page_size
    page_bits = page_size.bit_length() - 1  # shifts, because // rounds towards minus infinity at some cost
    exp2 = functools.partial(triton_parts.exp2, interpret=interpret)
    head, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(tile < tiles_ref[index])
    def attend() -> None:
        first = spec.tiles_offset(index) + tile * NUM_FIELDS
        token, num_tokens, position = (tiles_ref[first + f] for f in (TOKEN, NUM_TOKENS, POSITION))
        kv_begin, kv_end, slot = (tiles_ref[first + f] for f in (KV_BEGIN, KV_END, SLOT))
        first_page = tiles_ref[first + ROW] * pages_per_seq
        last_column = jnp.maximum(kv_end - 1, 0) >> page_bits

        rows = jnp.arange(num_rows)
        lanes = jnp.arange(head_dim)[None, :]
        q_tokens = jax.lax.div(rows, group)
        is_row = q_tokens < num_tokens
        q_rows = (token + q_tokens) * (spec.num_kv_heads * group) + head * group + jax.lax.rem(rows, group)
        q = plgpu.load(q_ref.at[q_rows[:, None], lanes], mask=is_row[:, None], other=0.0)
        window = spec.window

        def load_pages(start: Any) -> Any:
            # Never read past the range: ids after it are arbitrary. One id if a page contains the block.
            keys = start + jnp.arange(block_kv) if page_size % block_kv else start
            return pages_ref[first_page + jnp.minimum(keys >> page_bits, last_column)]

        def step(i: Any, carry: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
            m, total, acc, pages = carry
            start = kv_begin + i * block_kv
            keys = start + jnp.arange(block_kv)
            offsets = keys & (page_size - 1)
            readable = (keys < kv_end) if masked else None
            if masked and window is not None:
                readable &= keys > position - window
            block = _Block(spec, kv_ref, head, pages, offsets, readable)
            next_pages = load_pages(start + block_kv)
            scores = dot(q, block.load(0, q.dtype), contract_b=1)
            if spec.kv_dtype is not None:
                scores = scores * block.scales(0)[None, :]
            if unscaled_softcap is not None:
                scores = unscaled_softcap * jnp.tanh(scores / unscaled_softcap)
            if masked:
                visible = (keys[None, :] <= (position + q_tokens)[:, None]) & (keys < kv_end)[None, :]
                if window is not None:
                    visible &= keys[None, :] > (position - window + q_tokens)[:, None]
                scores = jnp.where(visible, scores, _MASKED)
            m_new = jnp.maximum(m, scores.max(axis=1))
            # The scale is positive, so it may be applied after the maximum, as one multiply-add.
            weights = exp2(scores * scale - (m_new * scale)[:, None])
            alpha = exp2((m - m_new) * scale)
            values, new_total = block.load(1, q.dtype), total * alpha + weights.sum(axis=1)
            if spec.kv_dtype is not None and not block.scales_values(q.dtype):
                weights = weights * block.scales(1)[None, :]
            acc = acc * alpha[:, None] + dot(weights.astype(values.dtype), values, contract_b=0)
            return m_new, new_total, acc, next_pages

        num_blocks = pl.cdiv(kv_end - kv_begin, block_kv)
        carry = (
            jnp.full((num_rows,), _NO_MAXIMUM, jnp.float32),
            jnp.zeros((num_rows,), jnp.float32),
            jnp.zeros((num_rows, head_dim), jnp.float32),
            load_pages(kv_begin),
        )
        num_window_blocks: Any = 0  # blocks with keys that are before some query's window
        num_seen_blocks: Any = 0
        if tile_class.whole_loop:
            num_seen_blocks = jnp.maximum(jnp.minimum(position + 1, kv_end) - kv_begin, 0) // block_kv
            if window is not None:
                num_hidden = jnp.maximum(position + num_tokens - window - kv_begin, 0)
                num_window_blocks = jnp.minimum(pl.cdiv(num_hidden, block_kv), num_blocks)
                num_seen_blocks = jnp.maximum(num_seen_blocks, num_window_blocks)
                carry = jax.lax.fori_loop(0, num_window_blocks, functools.partial(step, masked=True), carry)
            carry = jax.lax.fori_loop(
                num_window_blocks, num_seen_blocks, functools.partial(step, masked=False), carry
            )
        m, total, acc, _ = jax.lax.fori_loop(
            num_seen_blocks, num_blocks, functools.partial(step, masked=True), carry
        )
        total = jnp.where(total == 0, 1, total)  # a row that sees no key here has a result of zero
        total_with_sink = total
        if has_sinks:  # a part of a split range has none: the merge adds it
            sinks = plgpu.load(other_refs[0].at[head * group + jax.lax.rem(rows, group)])
            total_with_sink = total + jnp.where(slot < 0, exp2(sinks * _LOG2_E - m * scale), 0)
        acc = acc / total_with_sink[:, None]

        @pl.when(slot < 0)
        def store_result() -> None:
            plgpu.store(out_ref.at[q_rows[:, None], lanes], acc.astype(out_ref.dtype), mask=is_row[:, None])

        @pl.when(slot >= 0)
        def store_part() -> None:
            partial_rows = spec.partial_begin(index) + (slot * spec.num_kv_heads + head) * num_rows + rows
            plgpu.store(partial_out_ref.at[partial_rows[:, None], lanes], acc, mask=is_row[:, None])
            plgpu.store(partial_lse_ref.at[partial_rows], m * scale + jnp.log2(total), mask=is_row)


def _merge_kernel(
    tiles_ref: Any,
    partial_out_ref: Any,
    partial_lse_ref: Any,
    *other_refs: Any,
    spec: TileSpec,
    interpret: bool,
) -> None:
    """Store the weighted means of split tiles' parts, for one KV head and merges `stride` apart.

    `other_refs` are the sinks if there are any, the aliased input (unused) and the output.
    """
    *sinks_refs, _, out_ref = other_refs
    head, begin, stride = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    num_classes, group, head_dim = len(spec.blocks.classes), spec.group, out_ref.shape[1]
    exp2 = functools.partial(triton_parts.exp2, interpret=interpret)

    def combine(i: Any, nothing: Any) -> Any:
        first = spec.tiles_offset(num_classes) + (begin + i * stride) * NUM_FIELDS
        token, num_tokens = tiles_ref[first + MERGE_TOKEN], tiles_ref[first + MERGE_NUM_TOKENS]
        num_splits, class_rows = tiles_ref[first + MERGE_NUM_SPLITS], tiles_ref[first + MERGE_CLASS_ROWS]
        partial_row = tiles_ref[first + MERGE_PARTIAL] + head * class_rows
        part_stride = spec.num_kv_heads * class_rows
        # Query rows token by token; their order in a tile depends on its class.
        places = tiles_ref[first + MERGE_FIRST_ROW] + jnp.arange(MERGE_ROWS)
        lanes = jnp.arange(head_dim)[None, :]
        q_tokens, heads = jax.lax.div(places, group), jax.lax.rem(places, group)
        rows = places
        if spec.head_major_rows:
            head_major = class_rows >= spec.head_major_rows
            run_rows = jax.lax.div(class_rows, spec.run_heads)
            rows = jnp.where(head_major, heads * run_rows + q_tokens, places)
        is_row = q_tokens < num_tokens

        parts = jnp.arange(MAX_NUM_SPLITS)[:, None]
        lse = plgpu.load(
            partial_lse_ref.at[partial_row + parts * part_stride + rows[None, :]],
            mask=(parts < num_splits) & is_row[None, :],
            other=_MASKED,
        )
        largest = lse.max(axis=0)
        total = exp2(lse - largest[None, :]).sum(axis=0)
        for sinks_ref in sinks_refs:
            sinks = plgpu.load(sinks_ref.at[head * group + heads])
            total = total + exp2(sinks * _LOG2_E - largest)

        def step(i: Any, acc: Any) -> Any:
            # Parts are one block. One by one, weights would move between threads after a barrier, and every
            # part would wait for the one before.
            several = i * _MERGE_PARTS + jnp.arange(_MERGE_PARTS)
            part_rows = partial_row + several[:, None] * part_stride + rows[None, :]
            mask = (several < num_splits)[:, None] & is_row[None, :]
            part_lse = plgpu.load(partial_lse_ref.at[part_rows], mask=mask, other=_MASKED)
            part_out = plgpu.load(
                partial_out_ref.at[part_rows[:, :, None], lanes[None]], mask=mask[:, :, None], other=0.0
            )
            return acc + (part_out * exp2(part_lse - largest[None, :])[:, :, None]).sum(axis=0)

        acc = jnp.zeros((MERGE_ROWS, head_dim), jnp.float32)
        acc = jax.lax.fori_loop(0, pl.cdiv(num_splits, _MERGE_PARTS), step, acc) / total[:, None]
        q_rows = (token + q_tokens) * (spec.num_kv_heads * group) + head * group + heads
        plgpu.store(out_ref.at[q_rows[:, None], lanes], acc.astype(out_ref.dtype), mask=is_row[:, None])
        return nothing

    num_merges = jax.lax.div(tiles_ref[num_classes] - begin + stride - 1, stride)  # negative means none
    jax.lax.fori_loop(0, num_merges, combine, 0)


class _Block(NamedTuple):
    """Keys and values of one block and one KV head; `which` is 0 for keys and 1 for values."""

    spec: TileSpec
    kv_ref: Any  # [rows, head_dim]
    head: Any
    pages: Any  # page of every key, or one for all
    offsets: Any  # offsets of the keys in their pages
    mask: Any  # keys that may be read; None means all

    def load(self, which: int, dtype: Any) -> Any:
        """Load [block_kv, head_dim], zero where hidden; codes without scales, except with `scales_values`."""
        lanes = jnp.arange(self.kv_ref.shape[1])[None, :]
        mask = None if self.mask is None else self.mask[:, None]
        stored = load(self.kv_ref.at[self._rows(which, self.offsets)[:, None], lanes], mask)
        if self.spec.kv_dtype is None:
            return stored
        numbers = code_numbers(stored, self.spec.kv_dtype)
        if which and self.scales_values(dtype):
            numbers = numbers.astype(jnp.float32) * self.scales(which)[:, None]
        return numbers.astype(dtype)

    def scales_values(self, dtype: Any) -> bool:
        """Return whether `load` scales the values: float16 has too little range for weights times scales."""
        return self.spec.kv_dtype is not None and dtype == jnp.float16

    def scales(self, which: int) -> Any:
        """Return the scales f32[block_kv] of codes in 8 bits, zero where hidden."""
        kv_dtype, head_dim = self.spec.kv_dtype, self.kv_ref.shape[1]
        assert kv_dtype is not None
        places = scale_places(self.offsets, self.spec.page_size, head_dim)
        high, low = [load(self.kv_ref.at[self._rows(which, row), lane], self.mask) for row, lane in places]
        return scales_of_bytes(high, low) * code_factor(kv_dtype)

    def _rows(self, which: int, rows: Any) -> Any:
        """Return rows of `kv_ref` from rows of a page."""
        page_rows = self.spec.page_rows(self.kv_ref.shape[1])
        return (self.pages * page_rows + rows) * (2 * self.spec.num_kv_heads) + (2 * self.head + which)
