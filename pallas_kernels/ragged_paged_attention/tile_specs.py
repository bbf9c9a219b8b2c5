"""Static spec of a bucket's tile list: the most tiles of each class, and their place in the list.

Owns: the arguments that shape a list, the worst-case sizes, and so the layout of the flat i32 array.
Does not know: batches, or what a kernel does with a tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.devices import has_large_shared_memory
from pallas_kernels.ragged_paged_attention.backends import TABLE, AttentionBackend
from pallas_kernels.ragged_paged_attention.block_sizes import (
    MERGE_ROWS,
    BlockSizes,
    TileClass,
    default_block_sizes,
    power_of_two,
)
from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.page_formats import num_scale_rows

NUM_FIELDS = 8  # i32 fields of a tile or a merge; `tile_lists` names them
WARPGROUP_ROWS = 64  # rows of one computing warpgroup of a Mosaic kernel
BYTE_PAGE_SIZES = (32, 64)  # page sizes that a Mosaic kernel reads: one row of a page holds its scales
NUM_PROGRAMS = 132  # programs of a Mosaic launch: one for each multiprocessor of an H100 or H200
HEADER_LEN = 8  # counts of tiles, class by class, then the count of merges
NUM_DECODED = HEADER_LEN - 1  # place in the header of the number of pages to decode, with a scratch pool


@dataclass(frozen=True)
class TileSpec:
    """Static parameters of a compiled bucket; hashable. Heads are those of one shard.

    Attributes:
      num_tokens: padded query tokens.
      max_num_seqs: rows, including padding.
      group: query heads per KV head.
      num_kv_heads: KV heads.
      page_size: tokens of a page.
      backend: name of the back end.
      blocks: tile classes; none for back ends without tiles.
      kv_dtype: format of pages; None means the queries' dtype.
      scratch_pages: pages of a pool of the queries' dtype, into which pages in 8 bits that many tiles read
        are decoded first. Its tiles are those of the last class. 0 without such a pool.
      window: keys that a query sees, its own the last of them; None means all up to its own.
    """

    num_tokens: int
    max_num_seqs: int
    group: int
    num_kv_heads: int
    page_size: int
    backend: str
    blocks: BlockSizes
    kv_dtype: str | None = None
    scratch_pages: int = 0
    window: int | None = None

    def page_rows(self, head_dim: int) -> int:
        """Return the rows of a page with this head size, including those of scales."""
        return self.page_size + num_scale_rows(self.kv_dtype, self.page_size, head_dim)

    @property
    def head_major_rows(self) -> int:
        """Rows of the smallest class with tiles in head-major order; 0 if no class has them."""
        return min((c.rows for c in self.blocks.classes if c.mosaic), default=0)

    @property
    def run_heads(self) -> int:
        """Query heads, including padding to a power of two, for which a head-major tile has room."""
        return power_of_two(self.group)

    def tile_tokens(self, tile_class: TileClass) -> int:
        """Return the query tokens that a tile of the class holds."""
        return tile_class.rows // (self.run_heads if tile_class.mosaic else self.group)

    @cached_property
    def max_num_slots(self) -> tuple[int, ...]:
        """Slots for partial results, by class."""
        return tuple(2 * -(-c.target_programs // self.num_kv_heads) for c in self.blocks.classes)

    @cached_property
    def max_num_q_tiles(self) -> tuple[int, ...]:
        """Tiles before splitting, by class, for the worst batch of this shape."""
        sizes, rows = [], min(self.max_num_seqs, self.num_tokens)
        least = 1  # tokens of the shortest range that goes to the class
        last = len(self.blocks.classes) - 1
        for index, tile_class in enumerate(self.blocks.classes):
            tokens = self.tile_tokens(tile_class)
            most_rows = min(rows, self.num_tokens // least) + (index == last)  # plus the pseudo row
            most_rows = max(most_rows, 1)  # a traced list has an entry even for a class that no row can need
            # If the next class takes all longer ranges, a row has one tile.
            is_long = index >= self.first_long_class
            sizes.append(most_rows + self.num_tokens // tokens * is_long)
            least = tokens + 1
        return tuple(sizes)

    @cached_property
    def max_num_tiles(self) -> tuple[int, ...]:
        """Entries of the tile list, by class."""
        return tuple(a + b for a, b in zip(self.max_num_q_tiles, self.max_num_slots, strict=True))

    @cached_property
    def max_num_merges(self) -> int:
        """Entries of the merge list: a split tile has at least two slots."""
        return sum(
            slots // 2 * -(-c.rows // MERGE_ROWS)
            for slots, c in zip(self.max_num_slots, self.blocks.classes, strict=True)
        )

    @cached_property
    def tiles_len(self) -> int:
        """Length of the flat array; 0 for back ends without tiles."""
        if not self.blocks.classes:
            return 0
        return self.decoded_offset + 2 * self.scratch_pages

    @property
    def first_long_class(self) -> int:
        """Index of the first class whose ranges may have several tiles; that of a scratch pool follows it."""
        return len(self.blocks.classes) - 1 - (self.scratch_pages > 0)

    @property
    def decoded_offset(self) -> int:
        """Where the flat array has the pages to decode: entry i becomes page i of the scratch pool."""
        return HEADER_LEN + NUM_FIELDS * (sum(self.max_num_tiles) + self.max_num_merges)

    @property
    def table_offset(self) -> int:
        """Where it has the pages of the scratch pool that hold each row's keys, row after row."""
        return self.decoded_offset + self.scratch_pages

    def tiles_offset(self, class_index: int) -> int:
        """Return where the tiles of a class start in the flat array; one past the last class, the merges."""
        return HEADER_LEN + NUM_FIELDS * sum(self.max_num_tiles[:class_index])

    def partial_begin(self, class_index: int) -> int:
        """Return the first row of a class's partial results; one past the last class, the number of rows."""
        pairs = zip(self.max_num_slots[:class_index], self.blocks.classes[:class_index], strict=True)
        return sum(slots * self.num_kv_heads * c.rows for slots, c in pairs)


def result_shapes(spec: TileSpec, q: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Describe the outputs of the kernels of all classes; each kernel writes its own rows.

    They are results like `q`, and for parts of split ranges the partial results f32[num_partial_rows,
    head_dim] and their log-sum-exps in base 2, f32[num_partial_rows].
    """
    shard = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    num_partial_rows = spec.partial_begin(len(spec.blocks.classes))
    return (
        shard(q.shape, q.dtype),
        shard((num_partial_rows, q.shape[-1]), jnp.float32),
        shard((num_partial_rows,), jnp.float32),
    )


def make_tile_spec(
    *,
    num_tokens: int,
    max_num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
    backend: str,
    blocks: BlockSizes | None,
    kv_dtype: str | None,
    scratch_pages: int,
    window: int | None,
) -> TileSpec:
    """Return the spec for arguments that `api` has checked and a back end that it has chosen."""
    row = TABLE[backend]
    if not row.has_tiles:
        blocks = BlockSizes(())
    elif blocks is None:
        blocks = default_block_sizes(
            num_tokens=num_tokens,
            max_num_seqs=max_num_seqs,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            itemsize=jnp.dtype(dtype).itemsize,
            mosaic=row.has_mosaic_tiles and (kv_dtype is None or page_size in BYTE_PAGE_SIZES),
            in_bytes=kv_dtype is not None,
            large_shared_memory=has_large_shared_memory(jax.devices()[0]),
            has_scratch=scratch_pages > 0,
        )
        if kv_dtype is None or not _reads_16_bits(blocks):
            scratch_pages = 0  # a step with few tokens or without a Mosaic kernel for prompts
    group = num_q_heads // num_kv_heads
    if row.has_tiles:
        own = BlockSizes(blocks.classes[:-1] if scratch_pages else blocks.classes)
        _check_blocks(own, group, row)
        _check_byte_classes(own, row, page_size, kv_dtype)
    if not row.has_tiles:
        scratch_pages = 0
    if scratch_pages and (kv_dtype is None or not _reads_16_bits(blocks)):
        limit = "must be 0 unless pages are in 8 bits and the last class is a Mosaic one for 16 bits"
        raise AttentionArgumentError("scratch_pages", scratch_pages, limit)
    sizes = (num_tokens, max_num_seqs, group, num_kv_heads, page_size, backend, blocks, kv_dtype)
    return TileSpec(*sizes, scratch_pages, window)


def _reads_16_bits(blocks: BlockSizes) -> bool:
    """Return whether the last class is a Mosaic one for pages of 16 bits."""
    return any(c.mosaic and not c.in_bytes for c in blocks.classes[-1:])


def _check_blocks(blocks: BlockSizes, group: int, row: AttentionBackend) -> None:
    rows = [tile_class.rows for tile_class in blocks.classes]
    least = max(group, 8 if blocks.classes and blocks.classes[0].in_bytes else MERGE_ROWS)
    if not rows or rows != sorted(set(rows)) or rows[0] < least:
        limit = f"tile rows must ascend from {least} or more, for {group} heads per KV head"
        raise AttentionArgumentError("blocks", rows, limit)
    for value in rows[1:] + [tile_class.block_kv for tile_class in blocks.classes] + [max(rows[0], 16)]:
        if value < 16 or value & (value - 1):
            raise AttentionArgumentError("blocks", value, "rows and block_kv must be powers of two from 16")
    if len(rows) >= HEADER_LEN:
        raise AttentionArgumentError("blocks", rows, f"at most {HEADER_LEN - 1} classes")
    if [c.mosaic for c in blocks.classes] != sorted(c.mosaic for c in blocks.classes):
        raise AttentionArgumentError("blocks", rows, "mosaic classes must be the last ones")
    for tile_class in blocks.classes:
        sizes = (tile_class.rows, tile_class.block_kv)
        if tile_class.mosaic and not (row.has_mosaic_tiles and {*sizes} <= {64, 128}):
            limit = "a mosaic class needs backend pallas_mosaic_gpu, and 64 or 128 rows and keys"
            raise AttentionArgumentError("blocks", sizes, limit)


def _check_byte_classes(
    blocks: BlockSizes, row: AttentionBackend, page_size: int, kv_dtype: str | None
) -> None:
    """Raise AttentionArgumentError if a Mosaic class cannot read pages of this format."""
    for tile_class in blocks.classes:
        if kv_dtype is not None and tile_class.mosaic and not tile_class.in_bytes:
            raise AttentionArgumentError("blocks", tile_class, f"cannot read pages of {kv_dtype}")
        if not tile_class.in_bytes:
            continue
        sizes = (tile_class.rows, tile_class.block_kv, tile_class.num_warps // 8)
        is_known = tile_class.rows in (8, 16) and tile_class.block_kv in (64, 128) and sizes[2] in (1, 2, 3)
        is_known |= tile_class.mosaic  # `_check_blocks` checks its sizes like those for 16 bits
        if not (row.has_mosaic_tiles and kv_dtype is not None and is_known and page_size in BYTE_PAGE_SIZES):
            limit = (
                "a class for bytes needs backend pallas_mosaic_gpu, a kv_dtype, pages of "
                f"{BYTE_PAGE_SIZES}, and, for decoding, 8 or 16 rows, 64 or 128 keys, up to 3 pairs"
            )
            raise AttentionArgumentError("blocks", sizes, limit)
