"""Ragged paged attention in plain Triton: the tiles of `pallas_triton` without Pallas.

Owns: the bodies of two kernels: attention over the tiles of one class, and the merge of split key ranges.
Does not know: how tiles are chosen (`tile_lists`), or JAX. Called by: `jax_triton`, which launches them.

One program computes one tile for one KV head, as in `pallas_triton`. The query heads of that KV head and the
tile's tokens fold into the rows of one matrix. Keys are gathered by row address, and page ids are read one
iteration ahead. Only the last blocks of a range use the loop with masks.

Values that differ between buckets are run-time arguments (`*_ptr`, and integers that are not constexpr).
Values that differ between models and tile classes are constants. So buckets with the same classes share a
compiled kernel. Needs Triton, which the extra `triton` installs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.ragged_paged_attention import block_sizes, tile_lists, tile_specs

# A kernel can read module variables only if they are Triton constants.
ROW, TOKEN, NUM_TOKENS, POSITION, KV_BEGIN, KV_END, SLOT = map(
    tl.constexpr,
    (
        tile_lists.ROW, tile_lists.TOKEN, tile_lists.NUM_TOKENS, tile_lists.POSITION, tile_lists.KV_BEGIN,
        tile_lists.KV_END, tile_lists.SLOT,
    ),
)  # fmt: skip
MERGE_TOKEN, MERGE_NUM_TOKENS, MERGE_PARTIAL, MERGE_NUM_SPLITS, MERGE_CLASS_ROWS, MERGE_FIRST_ROW = map(
    tl.constexpr,
    (
        tile_lists.MERGE_TOKEN, tile_lists.MERGE_NUM_TOKENS, tile_lists.MERGE_PARTIAL,
        tile_lists.MERGE_NUM_SPLITS, tile_lists.MERGE_CLASS_ROWS, tile_lists.MERGE_FIRST_ROW,
    ),
)  # fmt: skip
NUM_FIELDS = tl.constexpr(tile_specs.NUM_FIELDS)
MERGE_ROWS = tl.constexpr(block_sizes.MERGE_ROWS)
MAX_NUM_SPLITS = tl.constexpr(block_sizes.MAX_NUM_SPLITS)
MERGE_PARTS = tl.constexpr(8)  # loaded together: the merge is bound by latency
# The maximum of a row that has seen no key. It is finite, and above the -inf of a hidden key. So weights of
# hidden keys are exactly zero even in a part where a row sees no key.
LEAST = tl.constexpr(-1e30)


@triton.jit
def ragged_paged_attention_tiles(
    tiles_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    class_index: tl.tensor,
    first_tile: tl.tensor,
    first_partial_row: tl.tensor,
    pages_per_seq: tl.tensor,
    scale: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    num_rows: tl.constexpr,
    block_kv: tl.constexpr,
    whole_loop: tl.constexpr,
) -> None:
    """Compute one tile of a class for one KV head; the grid is (KV heads, most tiles of the class).

    Args:
      tiles_ptr: i32[tiles_len], the flat tile list.
      pages_ptr: i32[max_num_seqs * pages_per_seq].
      q_ptr: [num_tokens * num_q_heads, head_dim].
      kv_ptr: [num_pages * page_size * 2 * num_kv_heads, head_dim], q's dtype.
      out_ptr: like q.
      partial_out_ptr: f32[num_partial_rows, head_dim].
      partial_lse_ptr: f32[num_partial_rows], base 2.
      class_index: index of the class's count in the header.
      first_tile: start of its tiles in the list.
      first_partial_row: its first row of partial results.
      pages_per_seq: columns of the page table.
      scale: factor on the scores, for base 2.
      num_kv_heads: KV heads.
      group: query heads per KV head.
      head_dim: elements of a head.
      page_size: tokens of a page.
      num_rows: rows of a tile.
      block_kv: keys per iteration.
      whole_loop: blocks that every query sees entirely are computed in a separate loop.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if tile < tl.load(tiles_ptr + class_index):
        fields = tiles_ptr + first_tile + tile * NUM_FIELDS
        token, num_tokens = tl.load(fields + TOKEN), tl.load(fields + NUM_TOKENS)
        position, slot = tl.load(fields + POSITION), tl.load(fields + SLOT)
        kv_begin, kv_end = tl.load(fields + KV_BEGIN), tl.load(fields + KV_END)
        row_pages = pages_ptr + tl.load(fields + ROW) * pages_per_seq

        rows = tl.arange(0, num_rows)
        q_tokens = rows // group
        is_row = q_tokens < num_tokens
        q_rows = (token + q_tokens) * (num_kv_heads * group) + head * group + rows % group
        q = tl.load(_row_pointers(q_ptr, q_rows, head_dim), mask=is_row[:, None], other=0.0)

        m = tl.full((num_rows,), LEAST, tl.float32)
        total = tl.zeros((num_rows,), tl.float32)
        acc = tl.zeros((num_rows, head_dim), tl.float32)
        pages = _load_pages(row_pages, kv_begin, kv_end, page_size, block_kv)
        num_blocks = tl.cdiv(kv_end - kv_begin, block_kv)
        num_whole = 0
        if whole_loop:
            num_whole = tl.maximum(tl.minimum(position + 1, kv_end) - kv_begin, 0) // block_kv
            for i in range(0, num_whole):
                m, total, acc, pages = _add_block(
                    m, total, acc, pages, q, kv_ptr, row_pages, kv_begin + i * block_kv, kv_end,
                    position + q_tokens, head, scale, num_kv_heads, head_dim, page_size, block_kv, False,
                )  # fmt: skip
        for i in range(num_whole, num_blocks):
            m, total, acc, pages = _add_block(
                m, total, acc, pages, q, kv_ptr, row_pages, kv_begin + i * block_kv, kv_end,
                position + q_tokens, head, scale, num_kv_heads, head_dim, page_size, block_kv, True,
            )  # fmt: skip
        total = tl.where(total == 0, 1.0, total)  # no visible key: the result is zero
        acc = acc / total[:, None]

        if slot < 0:
            result = acc.to(out_ptr.dtype.element_ty)
            tl.store(_row_pointers(out_ptr, q_rows, head_dim), result, mask=is_row[:, None])
        else:
            partial_rows = first_partial_row + (slot * num_kv_heads + head) * num_rows + rows
            tl.store(_row_pointers(partial_out_ptr, partial_rows, head_dim), acc, mask=is_row[:, None])
            tl.store(partial_lse_ptr + partial_rows, m * scale + tl.log2(total), mask=is_row)


@triton.jit
def _add_block(
    m: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    pages: tl.tensor,
    q: tl.tensor,
    kv_ptr: tl.tensor,
    row_pages: tl.tensor,
    start: tl.tensor,
    kv_end: tl.tensor,
    positions: tl.tensor,
    head: tl.tensor,
    scale: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_kv: tl.constexpr,
    masked: tl.constexpr,
) -> tl.tensor:
    """Return the running maximum and sums after one more block, and the page ids of the next block.

    pages: page ids of the block's keys, or one id for all; positions: i32[num_rows], of each row's query.
    """
    keys = start + tl.arange(0, block_kv)
    kv_rows = (pages * page_size + (keys & (page_size - 1))) * (2 * num_kv_heads) + 2 * head
    next_pages = _load_pages(row_pages, start + block_kv, kv_end, page_size, block_kv)
    k_ptrs = _row_pointers(kv_ptr, kv_rows, head_dim)
    in_range = keys < kv_end
    k = tl.load(k_ptrs, mask=in_range[:, None], other=0.0) if masked else tl.load(k_ptrs)
    # "ieee" is IEEE float32; the default would be TF32. It does not affect 16-bit operands.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if masked:
        visible = (keys[None, :] <= positions[:, None]) & in_range[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    # The scale is positive, so it may be applied after the maximum, as one multiply-add.
    weights = tl.exp2(scores * scale - (m_new * scale)[:, None])
    alpha = tl.exp2((m - m_new) * scale)
    v_ptrs = k_ptrs + head_dim
    v = tl.load(v_ptrs, mask=in_range[:, None], other=0.0) if masked else tl.load(v_ptrs)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, total * alpha + tl.sum(weights, 1), acc, next_pages


@triton.jit
def _load_pages(
    row_pages: tl.tensor, start: tl.tensor, kv_end: tl.tensor, page_size: tl.constexpr, block_kv: tl.constexpr
) -> tl.tensor:
    """Load the page ids of a block's keys; one id if a page contains the block.

    Never read past the range: ids after it are arbitrary.
    """
    columns = (start if page_size % block_kv == 0 else start + tl.arange(0, block_kv)) // page_size
    return tl.load(row_pages + tl.minimum(columns, tl.maximum(kv_end - 1, 0) // page_size))


@triton.jit
def _row_pointers(ptr: tl.tensor, rows: tl.tensor, row_len: tl.constexpr) -> tl.tensor:
    """Return pointers to all elements of rows i32[n]. A row number fits 32 bits, its offset needs 64."""
    return ptr + (rows.to(tl.int64) * row_len)[:, None] + tl.arange(0, row_len)[None, :]


@triton.jit
def ragged_paged_attention_merge(
    tiles_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_classes: tl.tensor,
    first_merge: tl.tensor,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
) -> None:
    """Store the weighted mean of a split tile's parts for MERGE_ROWS rows; the grid is (KV heads, merges).

    Args:
      tiles_ptr: i32[tiles_len], the flat tile list.
      partial_out_ptr: f32[num_partial_rows, head_dim].
      partial_lse_ptr: f32[num_partial_rows], base 2.
      out_ptr: [num_tokens * num_q_heads, head_dim]; the rows of split tiles are written.
      num_classes: number of tile classes; also the index of the count of merges in the header.
      first_merge: start of the merges in the list.
      num_kv_heads: KV heads.
      group: query heads per KV head.
      head_dim: elements of a head.
    """
    head = tl.program_id(0)
    merge = tl.program_id(1)
    if merge < tl.load(tiles_ptr + num_classes):
        fields = tiles_ptr + first_merge + merge * NUM_FIELDS
        token, num_tokens = tl.load(fields + MERGE_TOKEN), tl.load(fields + MERGE_NUM_TOKENS)
        num_splits, class_rows = tl.load(fields + MERGE_NUM_SPLITS), tl.load(fields + MERGE_CLASS_ROWS)
        partial_row = tl.load(fields + MERGE_PARTIAL) + head * class_rows
        stride = num_kv_heads * class_rows
        rows = tl.load(fields + MERGE_FIRST_ROW) + tl.arange(0, MERGE_ROWS)
        q_tokens = rows // group
        is_row = q_tokens < num_tokens

        parts = tl.arange(0, MAX_NUM_SPLITS)[:, None]
        lse = tl.load(
            partial_lse_ptr + partial_row + parts * stride + rows[None, :],
            mask=(parts < num_splits) & is_row[None, :],
            other=LEAST,
        )
        largest = tl.max(lse, 0)
        total = tl.sum(tl.exp2(lse - largest[None, :]), 0)
        acc = tl.zeros((MERGE_ROWS, head_dim), tl.float32)
        for start in tl.range(0, num_splits, MERGE_PARTS):
            several = start + tl.arange(0, MERGE_PARTS)
            part_rows = partial_row + several[:, None] * stride + rows[None, :]
            mask = (several < num_splits)[:, None] & is_row[None, :]
            part_lse = tl.load(partial_lse_ptr + part_rows, mask=mask, other=LEAST)
            pointers = (
                partial_out_ptr + part_rows[:, :, None] * head_dim + tl.arange(0, head_dim)[None, None, :]
            )
            part_out = tl.load(pointers, mask=mask[:, :, None], other=0.0)
            acc += tl.sum(part_out * tl.exp2(part_lse - largest[None, :])[:, :, None], 0)
        acc = acc / total[:, None]
        q_rows = (token + q_tokens) * (num_kv_heads * group) + head * group + rows % group
        result = acc.to(out_ptr.dtype.element_ty)
        tl.store(_row_pointers(out_ptr, q_rows, head_dim), result, mask=is_row[:, None])
