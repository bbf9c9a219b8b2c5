"""Shared parts of the Mosaic kernel's warpgroups: sizes, references, and the order of the items.

Owns: the static description of a launch, the named references to global and shared memory, and the loop over
a program's items. An item is one tile and one KV head. Does not know: what is done with an item.
Called by: all `mosaic_*` modules that run in a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.block_sizes import TileClass
from pallas_kernels.ragged_paged_attention.tile_lists import (
    KV_BEGIN,
    KV_END,
    NUM_TOKENS,
    POSITION,
    ROW,
    SLOT,
    TOKEN,
)
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_FIELDS, WARPGROUP_ROWS, TileSpec
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_PROGRAMS as NUM_PROGRAMS

# Elements of a 16-bit type in 128 bytes, the widest row of shared memory that the hardware swizzles.
COLUMNS = 64
# Layout of a product's operand in shared memory: tiles of eight rows. (Upstream's annotations make these
# classes abstract.)
TILES = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# Bytes of a multiprocessor's shared memory for operands and codes; the rest is for barriers.
_SHARED_BYTES = 226 * 1024
_MAX_CODE_STAGES = 4
_LOG2_E, _NO_SINK = math.log2(math.e), -1e30


@dataclass(frozen=True)
class KernelLaunch:
    """Static parameters of the kernel of one tile class.

    Attributes:
      spec: the step's spec.
      index: index of the tile class.
      pages_per_seq: columns of the page table.
      head_dim: elements of a head.
      scale: factor on the scores, for base 2.
      dtype: dtype of queries, pages and results.
      interpret: compile for the interpreter, which lacks a few of the operations.
      has_sinks: the heads have sinks.
    """

    spec: TileSpec
    index: int
    pages_per_seq: int
    head_dim: int
    scale: float
    dtype: Any
    interpret: bool
    has_sinks: bool = False

    @property
    def tile_class(self) -> TileClass:
        return self.spec.blocks.classes[self.index]

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups that compute, one for each `WARPGROUP_ROWS` rows."""
        return self.tile_class.rows // WARPGROUP_ROWS

    @property
    def num_pairs(self) -> int:
        """Pairs of warpgroups in a program, each with its own items; see `mosaic_bytes`."""
        return self.tile_class.num_warps // 8 if self.tile_class.decodes_bytes else 1

    @property
    def num_programs(self) -> int:
        """Programs, or pairs of all programs, among which the items are divided."""
        return NUM_PROGRAMS * self.num_pairs

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a whole tile."""
        return self.spec.tile_tokens(self.tile_class)

    @property
    def run_rows(self) -> int:
        """Rows of one warpgroup that belong to one query head."""
        return min(self.tile_tokens, WARPGROUP_ROWS)

    @property
    def pages_per_block(self) -> int:
        """Pages of a block of keys."""
        return self.tile_class.block_kv // self.spec.page_size

    @property
    def column_starts(self) -> range:
        """First columns of the squares in which shared memory holds a head's elements."""
        return range(0, self.head_dim, COLUMNS)

    def runs(self, warpgroup: Any) -> list[tuple[int, Any, Any]]:
        """Return the first row, the query head and the first token of each run of a warpgroup's rows.

        If the group is not a power of two, the heads after its last are padding.
        """
        firsts = range(0, WARPGROUP_ROWS, self.run_rows)
        rows = [warpgroup * WARPGROUP_ROWS + first for first in firsts]
        tokens = self.tile_tokens
        return [(f, lax.div(r, tokens), lax.rem(r, tokens)) for f, r in zip(firsts, rows, strict=True)]

    @property
    def may_stand_by(self) -> bool:
        """Whether a warpgroup may have no token of a tile: with 128 rows and one query head per KV head."""
        return self.tile_tokens > WARPGROUP_ROWS

    @property
    def has_spare_heads(self) -> bool:
        """Whether some rows are padding without a query head."""
        return self.spec.run_heads > self.spec.group

    def stage_of(self, block: Any) -> Any:
        """Return the stage of a block in the ring; blocks are counted over all items of a program."""
        return lax.rem(block, self.tile_class.num_stages)

    @property
    def num_code_stages(self) -> int:
        """Blocks of codes of keys, and of values, that shared memory holds beside queries and operands."""
        keys, pages = self.tile_class.block_kv, self.pages_per_block
        taken = 4 * (self.tile_class.rows + self.tile_class.num_stages * keys)
        room = _SHARED_BYTES - taken * self.head_dim
        return max(min(room // (2 * (keys + pages) * self.head_dim), _MAX_CODE_STAGES), 1)

    def code_stage_of(self, block: Any) -> Any:
        """Return the stage of a block in the ring of codes, as `stage_of`."""
        return lax.rem(block, self.num_code_stages)


class Item(NamedTuple):
    """One tile and one KV head; the fields of the tile are those of `tile_lists`."""

    head: Any
    row: Any
    token: Any
    num_tokens: Any
    position: Any
    kv_begin: Any
    kv_end: Any
    slot: Any

    def num_blocks(self, launch: KernelLaunch) -> Any:
        """Return the number of blocks of its key range; 0 for tokens that belong to no row."""
        block_kv = launch.tile_class.block_kv
        return lax.div(jnp.maximum(self.kv_end - self.kv_begin, 0) + (block_kv - 1), block_kv)

    def num_window_blocks(self, launch: KernelLaunch) -> Any:
        """Return the number of its first blocks with keys before some token's window."""
        assert launch.spec.window is not None
        num_hidden = self.position + self.num_tokens - launch.spec.window - self.kv_begin
        block_kv = launch.tile_class.block_kv
        return lax.div(jnp.maximum(num_hidden, 0) + (block_kv - 1), block_kv)


class Inputs(NamedTuple):
    """References to global memory."""

    tiles: Any  # i32[tiles_len]
    pages: Any  # i32[max_num_seqs * pages_per_seq]
    q: Any  # [num_tokens, num_q_heads, head_dim]
    kv: Any  # [num_pages * page_size, 2 * num_kv_heads * head_dim]
    out: Any  # like q
    partial_out: Any  # f32[num_partial_rows, head_dim]
    partial_lse: Any  # f32[num_partial_rows], base 2
    sinks: Any = None  # f32[num_q_heads]

    @classmethod
    def of(cls, launch: KernelLaunch, refs: tuple[Any, ...]) -> Inputs:
        """Name the arguments of a kernel, which has the sinks, if there are any, before the outputs."""
        if not launch.has_sinks:
            return cls(*refs)
        num_arrays = cls._fields.index("out")
        return cls(*(refs[:num_arrays] + refs[num_arrays + 1 :] + refs[num_arrays : num_arrays + 1]))

    def sink(self, launch: KernelLaunch, item: Item, head: Any) -> Any:
        """Return the sink of a query head of the item's KV head, in base 2.

        Parts of a split range have none, since the merge adds it: theirs has no weight.
        """
        found = self.sinks[item.head * launch.spec.group + head] * _LOG2_E
        return jnp.where(item.slot < 0, found, _NO_SINK)


class BlockRing(NamedTuple):
    """Blocks of keys or of values in shared memory, by stage, and the barriers over them."""

    blocks: Any
    ready: Any
    free: Any
    scales: Any = None  # i8[num_code_stages, pages_per_block, head_dim]: rows of pages in 8 bits


class Codes(NamedTuple):
    """Blocks of codes, as stored in pages: i8[num_code_stages, block_kv, head_dim]."""

    keys: BlockRing
    values: BlockRing


class Shared(NamedTuple):
    """References to shared memory, and its barriers: `ready` to be read, `free` to be written."""

    q: Any  # two buffers of [num_warpgroups, head_dim // 64, 64, 64]; results leave through the same buffer
    k: Any  # [num_stages, block_kv, head_dim]
    v: Any
    q_ready: Any  # one for each buffer
    q_free: Any
    k_ready: Any  # one for each stage
    k_free: Any
    v_ready: Any
    v_free: Any
    turn: Any  # one for each warpgroup: it may issue its products
    values_clean: Any

    @property
    def rings(self) -> tuple[BlockRing, BlockRing]:
        """The rings of keys and of values."""
        return BlockRing(self.k, self.k_ready, self.k_free), BlockRing(self.v, self.v_ready, self.v_free)

    def q_tiles(self, launch: KernelLaunch) -> Any:
        """Return the queries as the operand of a product, in tiles of eight rows."""
        return self.q if launch.interpret else self.q[0]

    def q_rows(self, launch: KernelLaunch) -> Any:
        """Return the same memory row by row, so that a copy may start at any token."""
        return self.q if launch.interpret else self.q[1]


ItemBody = Callable[[Any, Item, Any], None]


def for_each_item(launch: KernelLaunch, inputs: Inputs, program: Any, body: ItemBody) -> tuple[Any, Any]:
    """Call `body(i, i-th item of this program, number of blocks of its earlier items)` for every item.

    Return the numbers of items and blocks. Tiles are ordered by width, those of prompts also row by row. They
    are dealt to the programs in alternating directions, so every program gets about the same work.
    """
    spec, num_programs = launch.spec, launch.num_programs
    num_items = inputs.tiles[launch.index] * spec.num_kv_heads

    def place(i: Any) -> Any:
        return jnp.where(lax.rem(i, 2) == 0, program, num_programs - 1 - program)

    def step(i: Any, blocks_before: Any) -> Any:
        index = i * num_programs + place(i)
        tile = lax.div(index, spec.num_kv_heads)
        first = spec.tiles_offset(launch.index) + tile * NUM_FIELDS
        fields = (ROW, TOKEN, NUM_TOKENS, POSITION, KV_BEGIN, KV_END, SLOT)
        item = Item(index - tile * spec.num_kv_heads, *(inputs.tiles[first + field] for field in fields))
        body(i, item, blocks_before)
        return blocks_before + item.num_blocks(launch)

    num_rounds = lax.div(num_items, num_programs)
    one_more = place(num_rounds) < lax.rem(num_items, num_programs)
    count = num_rounds + one_more.astype(jnp.int32)
    return count, lax.fori_loop(0, count, step, jnp.int32(0))


def page_ids(launch: KernelLaunch, inputs: Inputs, item: Item, block: Any) -> tuple[Any, ...]:
    """Return the page ids of a block of the item's range.

    Columns are clipped to the range. Ids after it are arbitrary, and the last iteration of a loop asks for
    the block before the first. If the range ends inside a block, its last page is repeated. Likewise the page
    in which a window begins replaces pages before it, which may hold anything.
    """
    page_size = launch.spec.page_size
    first: Any = 0
    if (window := launch.spec.window) is not None:
        first = lax.div(jnp.maximum(item.position - (window - 1), 0), page_size)
    begin = lax.div(item.kv_begin, page_size) + block * launch.pages_per_block
    last = lax.div(jnp.maximum(item.kv_end - 1, 0), page_size)
    columns = [jnp.clip(begin + p, first, last) for p in range(launch.pages_per_block)]
    return tuple(inputs.pages[item.row * launch.pages_per_seq + column] for column in columns)
