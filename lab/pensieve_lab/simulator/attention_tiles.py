"""The time of prompt attention as the Hopper kernel deals its tiles to multiprocessors.

Owns: the costs of a tile list's items, and the time of the program that has the most to do.
Does not know: how lists are made (`pallas_kernels` makes these, as for a device), decodes, other kernels, or
what else a step does.

A tile is some query tokens of all query heads of one KV head. An item is a tile against one range of keys.
Programs take items from the list back and forth, and the step waits for the fullest one. Pages in 8 bits are
decoded once per layer for long prompts; other tiles convert them on their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pallas_kernels.ragged_paged_attention import BlockSizes

_NUM_PROGRAMS: Final = 132  # multiprocessors of an H100 or H200
_BLOCK_KEYS: Final = 128
_PAGE_TOKENS: Final = 32
_SMALL_ROWS: Final = 64  # rows of a tile that runs on one computing warpgroup, or fewer
_LEAST_BUCKET: Final = 32  # a smaller one has the Triton kernel, whose costs are not known


class _Launch(NamedTuple):
    """The tiles of one class, which a launch computes for every KV head.

    Attributes:
      rows: rows of a tile.
      converts: whether the tiles convert keys and values of 8 bits.
      num_blocks: by tile in the order of the list, its keys in blocks of 128; f64[num_tiles].
      is_part: whether the tile was cut; bool[num_tiles].
    """

    rows: int
    converts: bool
    num_blocks: np.ndarray
    is_part: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TileCosts:
    """Coefficients of prompt attention for one layer, and the sizes of the model.

    Attributes:
      block_s: time of a tile of 128 rows against a block of 128 keys.
      small_share: share of `block_s` that a tile of at most 64 rows takes.
      item_s: time of an item beside its blocks.
      part_s: time of an item more, if its tile was cut: its partial results.
      launch_s: time of a launch beside its items.
      merge_s: time of the launch that merges the parts of tiles which were cut.
      merge_byte_s: its time per byte of partial results.
      convert_share: how much longer a block takes if the tile converts keys and values of 8 bits.
      decode_s: time of the launch that decodes pages of 8 bits.
      decode_token_s: its time per token.
      beside_share: how much longer rows of one token take beside prompts.
      num_layers: layers of the model.
      num_q_heads: query heads of a layer.
      num_kv_heads: KV heads of a layer.
      head_dim: elements of a head.
      fills_rounds: whether tiles that fill rounds of programs stay whole, as kernels since November 2026 do.
      decodes_pages: whether pages of 8 bits are decoded for long prompts, as in the same kernels.
      in_bytes: whether the KV cache is stored in 8 bits; always False in files.
    """

    block_s: float
    small_share: float
    item_s: float
    part_s: float
    launch_s: float
    merge_s: float
    merge_byte_s: float
    convert_share: float
    decode_s: float
    decode_token_s: float
    beside_share: float
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    fills_rounds: bool
    decodes_pages: bool
    in_bytes: bool = False

    def seconds(self, rows: Sequence[tuple[int, int]], bucket: int, window: int | None = None) -> float:
        """Return the time of all layers for rows of (query tokens, context tokens at their end).

        Args:
          rows: rows of more than one query token.
          bucket: padded tokens of the step.
          window: that of all layers.
        """
        launches, num_decoded = _divide(self, tuple(rows), max(bucket, _LEAST_BUCKET), window)
        found = sum([self._launch_seconds(launch) for launch in launches])
        if num_decoded:
            found += self.decode_s + self.decode_token_s * num_decoded * _PAGE_TOKENS
        return self.num_layers * found

    def _launch_seconds(self, launch: _Launch) -> float:
        """Return the time of a launch, and of the merge of its parts."""
        block_s = self.block_s * (self.small_share if launch.rows <= _SMALL_ROWS else 1.0)
        if launch.converts:
            block_s *= 1 + self.convert_share
        item_s = launch.num_blocks * block_s + self.item_s + self.part_s * launch.is_part
        found = self.launch_s + self._busiest(item_s)
        if num_parts := int(launch.is_part.sum()):
            num_bytes = 4 * num_parts * self.num_kv_heads * launch.rows * self.head_dim
            found += self.merge_s + self.merge_byte_s * num_bytes
        return found

    def _busiest(self, costs: np.ndarray) -> float:
        """Return the cost of the fullest program, if each tile of a list is an item of every KV head."""
        items = np.repeat(costs, self.num_kv_heads)
        rounds = np.zeros((-(-len(items) // _NUM_PROGRAMS), _NUM_PROGRAMS))
        rounds.flat[: len(items)] = items
        rounds[1::2] = rounds[1::2, ::-1]
        return float(rounds.sum(axis=0).max())


# The kernels' package imports JAX, which only a profile with tiles needs. So it is imported late.


def _classes(sizes: TileCosts, bucket: int) -> BlockSizes:
    """Return the tile classes of the kernel for a step."""
    from pallas_kernels.ragged_paged_attention import BlockSizes
    from pallas_kernels.ragged_paged_attention.block_sizes import default_block_sizes

    found = default_block_sizes(
        num_tokens=bucket,
        max_num_seqs=bucket,
        num_q_heads=sizes.num_q_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        itemsize=2,
        mosaic=True,
        in_bytes=sizes.in_bytes,
        has_scratch=sizes.in_bytes and sizes.decodes_pages,
    )
    if sizes.fills_rounds:
        return found
    return BlockSizes(tuple(dataclasses.replace(one, fills_rounds=False) for one in found.classes))


@functools.lru_cache(maxsize=256)
def _divide(
    sizes: TileCosts, rows: tuple[tuple[int, int], ...], bucket: int, window: int | None
) -> tuple[list[_Launch], int]:
    """Return the launches that have tiles, and how many pages are decoded first."""
    from pallas_kernels.ragged_paged_attention import TileSpec, build_tiles
    from pallas_kernels.ragged_paged_attention.tile_lists import KV_BEGIN, KV_END, SLOT
    from pallas_kernels.ragged_paged_attention.tile_specs import NUM_DECODED, NUM_FIELDS

    blocks = _classes(sizes, bucket)
    lens = np.array(rows, np.int32)
    cu_q_lens = np.concatenate([np.zeros(1, np.int32), np.cumsum(lens[:, 0], dtype=np.int32)])
    num_pages = -(-lens[:, 1] // _PAGE_TOKENS)
    has_scratch = sizes.in_bytes and not blocks.classes[-1].in_bytes
    spec = TileSpec(
        num_tokens=int(cu_q_lens[-1]),  # so that no tile is padding
        max_num_seqs=len(rows),
        group=sizes.num_q_heads // sizes.num_kv_heads,
        num_kv_heads=sizes.num_kv_heads,
        page_size=_PAGE_TOKENS,
        backend="pallas_mosaic_gpu",
        blocks=blocks,
        kv_dtype="int8" if sizes.in_bytes else None,
        scratch_pages=int(num_pages.sum()) if has_scratch else 0,
        window=window,
    )
    pages = np.zeros((len(rows), int(num_pages.max())), np.int32)
    pages[np.arange(num_pages.max()) < num_pages[:, None]] = np.arange(num_pages.sum(), dtype=np.int32)
    tiles = build_tiles(spec, cu_q_lens, lens[:, 1], len(rows), None, pages)
    launches = []
    for index, tile_class in enumerate(blocks.classes):
        first, num_tiles = spec.tiles_offset(index), int(tiles[index])
        if num_tiles:
            table = tiles[first : first + NUM_FIELDS * num_tiles].reshape(-1, NUM_FIELDS)
            num_blocks = -(-(table[:, KV_END] - table[:, KV_BEGIN]) // tile_class.block_kv)
            keys_share = tile_class.block_kv / _BLOCK_KEYS
            is_part = table[:, SLOT] >= 0
            launches.append(_Launch(tile_class.rows, tile_class.in_bytes, num_blocks * keys_share, is_part))
    return launches, int(tiles[NUM_DECODED]) if has_scratch else 0
