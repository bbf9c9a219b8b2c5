"""The tile list: a step's attention cut into pieces of bounded, similar size.

Owns: the static spec of a bucket (how many tiles of each class it can need), the layout of the flat i32
array, and its builder, which runs on the host with numpy or inside a jit with jax.numpy on the same lines
of code. Does not know: what a kernel does with a tile. Called by: the step planner, `api`, and the Triton
kernel.

What a tile and a merge are: `tile_lists`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.block_sizes import (
    MERGE_ROWS,
    BlockSizes,
    TileClass,
    default_block_sizes,
)
from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.tile_lists import HEADER_LEN, NUM_FIELDS, build_lists


@dataclass(frozen=True)
class TileSpec:
    """What is fixed when a bucket is compiled; hashable. Heads are those of one shard.

    Attributes:
      num_tokens: padded query tokens.
      max_num_seqs: rows, padding included.
      group: query heads per KV head.
      num_kv_heads: KV heads.
      page_size: tokens of a page.
      backend: the back end that serves it.
      blocks: tile classes; none for back ends without tiles.
    """

    num_tokens: int
    max_num_seqs: int
    group: int
    num_kv_heads: int
    page_size: int
    backend: str
    blocks: BlockSizes

    def tile_tokens(self, tile_class: TileClass) -> int:
        """Query tokens that a tile of the class holds."""
        return tile_class.rows // self.group

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
            most_rows = min(rows, self.num_tokens // least) + (index == last)  # and the pseudo row
            # Where the next class takes every longer range, a row has one tile.
            sizes.append(most_rows if index < last else self.num_tokens // tokens + most_rows)
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
            slots // 2 * (c.rows // MERGE_ROWS)
            for slots, c in zip(self.max_num_slots, self.blocks.classes, strict=True)
        )

    @cached_property
    def tiles_len(self) -> int:
        """Length of the flat array; 0 for back ends without tiles."""
        if not self.blocks.classes:
            return 0
        return HEADER_LEN + NUM_FIELDS * (sum(self.max_num_tiles) + self.max_num_merges)

    def tiles_offset(self, class_index: int) -> int:
        """Where in the flat array the tiles of a class begin; one past the last class: the merges."""
        return HEADER_LEN + NUM_FIELDS * sum(self.max_num_tiles[:class_index])

    def partial_begin(self, class_index: int) -> int:
        """First row of a class's partial results; one past the last class: how many rows there are."""
        pairs = zip(self.max_num_slots[:class_index], self.blocks.classes[:class_index], strict=True)
        return sum(slots * self.num_kv_heads * c.rows for slots, c in pairs)


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
) -> TileSpec:
    """The spec for arguments that `api` has checked and a back end that it has resolved."""
    if backend != "pallas_triton":
        blocks = BlockSizes(())
    elif blocks is None:
        blocks = default_block_sizes(
            num_tokens=num_tokens,
            max_num_seqs=max_num_seqs,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            itemsize=jnp.dtype(dtype).itemsize,
        )
    group = num_q_heads // num_kv_heads
    if backend == "pallas_triton":
        _check_blocks(blocks, group)
    return TileSpec(num_tokens, max_num_seqs, group, num_kv_heads, page_size, backend, blocks)


def _check_blocks(blocks: BlockSizes, group: int) -> None:
    rows = [tile_class.rows for tile_class in blocks.classes]
    if not rows or rows != sorted(set(rows)) or rows[0] < max(group, MERGE_ROWS):
        limit = f"tile rows must ascend from {max(group, MERGE_ROWS)} or more, for {group} heads per KV head"
        raise AttentionArgumentError("blocks", rows, limit)
    for value in rows + [tile_class.block_kv for tile_class in blocks.classes]:
        if value < 16 or value & (value - 1):
            raise AttentionArgumentError("blocks", value, "rows and block_kv must be powers of two from 16")


def build_tiles(
    spec: TileSpec,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    num_seqs: np.ndarray | int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The tile list of one step, on the host.

    Args:
      spec: the bucket's spec.
      cu_q_lens: i32[max_num_seqs + 1]; entries past num_seqs are ignored.
      kv_lens: i32[max_num_seqs].
      num_seqs: i32[1] or an int.
      out: i32[tiles_len] to write into; what it held does not matter. None: a new array.

    Returns:
      i32[tiles_len], `out` if given.

    Raises:
      AttentionArgumentError: more rows or query tokens than the spec holds, or `out` of another length.
    """
    num_rows = int(np.asarray(num_seqs).reshape(-1)[0])
    if out is None:
        out = np.zeros(spec.tiles_len, np.int32)
    elif out.shape != (spec.tiles_len,):
        raise AttentionArgumentError(
            "out.shape", out.shape, f"must be ({spec.tiles_len},), the spec's tiles_len"
        )
    if num_rows > spec.max_num_seqs:
        raise AttentionArgumentError("num_seqs", num_rows, f"the spec holds {spec.max_num_seqs} rows")
    if not spec.blocks.classes:
        return out
    used = int(cu_q_lens[num_rows]) if num_rows else 0
    if used > spec.num_tokens:
        raise AttentionArgumentError("cu_q_lens", used, f"the spec holds {spec.num_tokens} query tokens")
    rows = np.zeros((3, num_rows + 1), np.int32)
    rows[0] = cu_q_lens[: num_rows + 1]
    rows[1, :-1] = rows[0, 1:] - rows[0, :-1]
    rows[1, -1] = spec.num_tokens - used
    rows[2, :-1] = kv_lens[:num_rows]
    counts, lists = build_lists(np, spec, *rows)
    out[:HEADER_LEN] = 0
    out[: len(counts)] = counts
    for index, entries in enumerate(lists):
        offset = spec.tiles_offset(index)
        out[offset : offset + entries.size] = entries.ravel()
    return out


def build_tiles_traced(
    spec: TileSpec, cu_q_lens: jax.Array, kv_lens: jax.Array, num_seqs: jax.Array
) -> jax.Array:
    """As `build_tiles`, inside a jit; for callers without a host plan. i32[tiles_len]."""
    real = jnp.arange(spec.max_num_seqs) < num_seqs[0]
    used = cu_q_lens[num_seqs[0]]
    begins = jnp.append(jnp.where(real, cu_q_lens[:-1], 0), used)
    q_lens = jnp.append(jnp.where(real, cu_q_lens[1:] - cu_q_lens[:-1], 0), spec.num_tokens - used)
    lens = jnp.append(jnp.where(real, kv_lens, 0), 0)
    counts, lists = build_lists(jnp, spec, begins, q_lens, lens)
    header = jnp.zeros(HEADER_LEN, jnp.int32).at[: len(counts)].set(jnp.stack(counts))
    return jnp.concatenate([header, *(entries.astype(jnp.int32).ravel() for entries in lists)])
