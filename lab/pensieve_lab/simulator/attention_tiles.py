"""The time of prompt attention as the Hopper kernel deals its tiles to multiprocessors.

Owns: the tiles of a step's rows, how long key ranges are cut into items, and the time of the program that has
the most to do.
Does not know: decodes, other kernels, or what else a step does.

A tile is some query tokens of all query heads of one KV head. An item is a tile against one range of keys.
Programs take items from the longest to the shortest, back and forth. The step waits for the fullest program,
so that a chunk of a few hundred tokens behind a long context leaves a fifth of the device idle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_BLOCK_KEYS: Final = 128
_SMALL_STEP_TOKENS: Final = 256  # steps up to this size have tiles of half the tokens
_TILE_TOKENS: Final = {True: 16, False: 32}  # by whether the step is small
_LEAST_KEYS: Final = {True: 256, False: 1024}  # no item is cut shorter
_MAX_PARTS: Final = 32


@dataclass(frozen=True, kw_only=True)
class TileCosts:
    """Coefficients of prompt attention, for one layer, and the sizes of kernel and device.

    Attributes:
      block_s: time of a tile against a block of 128 keys.
      small_share: share of `block_s` that a tile of a small step takes.
      item_s: time of an item beside its blocks.
      launch_s: time of a launch beside its items.
      merge_s: time of the launch that merges tiles which were cut.
      stored_share: how much longer a block takes if the KV cache is stored in 8 bits.
      beside_share: how much longer rows of one token take beside prompts.
      num_layers: layers of the model.
      num_kv_heads: KV heads of a layer.
      num_programs: multiprocessors.
      target_programs: programs for which key ranges are cut.
    """

    block_s: float
    small_share: float
    item_s: float
    launch_s: float
    merge_s: float
    stored_share: float
    beside_share: float
    num_layers: float
    num_kv_heads: float
    num_programs: float
    target_programs: float

    def seconds(self, rows: Sequence[tuple[int, int]], bucket: int, window: int | None = None) -> float:
        """Return the time of all layers for rows of (query tokens, context tokens at their end).

        Args:
          rows: rows of more than one query token.
          bucket: padded tokens of the step.
          window: that of all layers.
        """
        is_small = bucket <= _SMALL_STEP_TOKENS
        target = math.ceil(self.target_programs / self.num_kv_heads)
        blocks, is_cut = _items(tuple(rows), is_small, target, window)
        block_s = self.block_s * (self.small_share if is_small else 1.0)
        item_s = np.repeat(np.sort(blocks)[::-1], round(self.num_kv_heads)) * block_s + self.item_s
        busiest_s = float(_dealt(item_s, round(self.num_programs)).max())
        return self.num_layers * (busiest_s + self.launch_s + self.merge_s * is_cut)


@functools.lru_cache(maxsize=256)
def _items(
    rows: tuple[tuple[int, int], ...], is_small: bool, target: int, window: int | None
) -> tuple[np.ndarray, bool]:
    """Return the blocks of every item of one KV head, and whether a tile was cut.

    `target` is the number of programs for one KV head. A tile's keys begin at its first token's window.
    """
    size = _TILE_TOKENS[is_small]
    ends = np.concatenate(
        [kv_len - q_len + np.minimum(np.arange(size, q_len + size, size), q_len) for q_len, kv_len in rows]
    )
    if window is not None:
        firsts = np.concatenate([kv_len - q_len + np.arange(0, q_len, size) for q_len, kv_len in rows])
        ends -= np.maximum(firsts - window + 1, 0) // _BLOCK_KEYS * _BLOCK_KEYS
    longest = max(_LEAST_KEYS[is_small], -(-int(ends.sum()) // target))
    num_parts = np.clip(-(-ends // longest), 1, _MAX_PARTS)
    part_keys = -(-ends // (num_parts * _BLOCK_KEYS)) * _BLOCK_KEYS
    num_parts = -(-ends // part_keys)
    blocks = np.repeat(part_keys // _BLOCK_KEYS, num_parts)
    last = np.cumsum(num_parts) - 1
    blocks[last] = -(-(ends - (num_parts - 1) * part_keys) // _BLOCK_KEYS)
    return blocks, bool((num_parts > 1).any())


def _dealt(item_s: np.ndarray, num_programs: int) -> np.ndarray:
    """Return the seconds of each program; items are given from the longest on."""
    rounds = np.zeros((-(-len(item_s) // num_programs), num_programs))
    rounds.flat[: len(item_s)] = item_s
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.sum(axis=0)
