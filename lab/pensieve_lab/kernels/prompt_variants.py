"""Variants of the kernel for prompts: the format of pages, and the rule by which work is divided.

Owns: the variants, the function of each, and a model of their time, from which predictions come.
Does not know: how a variant is timed or checked. Called by `benchmark_prompts`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    TileSpec,
    build_tiles,
    byte_class,
    byte_prompt_class,
    mosaic_class,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.shapes import GQA10
from pallas_kernels.ragged_paged_attention.tile_lists import KV_BEGIN, KV_END, SLOT
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_DECODED, NUM_FIELDS, NUM_PROGRAMS

PAGE_SIZE = 32
_SCALE = 1 / math.sqrt(GQA10.head_dim)


class Kernel(NamedTuple):
    """A compiled form of the kernel.

    Attributes:
      classes: the classes for decoding and for prompts.
      block_us: predicted microseconds of a block of 128 keys of a prompt.
      kv_dtype: format of the pages.
      scratch_pages: pages that are decoded before prompts read them.
    """

    classes: tuple[TileClass, ...]
    block_us: float
    kv_dtype: str | None = None
    scratch_pages: int = 0


_PLAIN = mosaic_class(128, 128, 2, 1024, 264)
_BYTES = (byte_class(8, 128, 2, 3, 256, 264), byte_prompt_class(128, 64, 3, 1024, 264))
KERNELS: dict[str, Kernel] = {
    "bf16": Kernel((mosaic_class(64, 128, 3, 256, 264), _PLAIN), 1.74),
    "int8": Kernel(_BYTES, 2.70, "int8"),
    "int8_scratch": Kernel((*_BYTES, _PLAIN), 1.74, "int8", scratch_pages=753),
}
# Whether tiles fill rounds of programs where this is faster, by the name of the rule.
CUTS: dict[str, bool] = {"uniform": False, "rounds": True}
_ITEM_US, _PART_US = 3.4, 2.5


def spec_of(kernel: Kernel, *, num_tokens: int, max_num_seqs: int, cuts: str = "rounds") -> TileSpec:
    """Return the spec of a kernel and a rule; the layout of lists is the same for all rules."""
    decoding, *prompts = kernel.classes
    prompts = [dataclasses.replace(one, fills_rounds=CUTS[cuts]) for one in prompts]
    return tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=GQA10.num_q_heads,
        num_kv_heads=GQA10.num_kv_heads, head_dim=GQA10.head_dim, page_size=PAGE_SIZE, dtype="bfloat16",
        backend="pallas_mosaic_gpu", blocks=BlockSizes((decoding, *prompts)), kv_dtype=kernel.kv_dtype,
        scratch_pages=kernel.scratch_pages,
    )  # fmt: skip


def function_of(spec: TileSpec) -> Callable[..., jax.Array]:
    """Return attention of (q, pool, tiles, kv_lens, page_indices, cu_q_lens, num_seqs)."""

    def attend(q: jax.Array, pool: jax.Array, tiles: jax.Array, *rows: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            q, pool, *rows, sm_scale=_SCALE, metadata=(spec, tiles), kv_dtype=spec.kv_dtype
        )

    return attend


def tiles_of(kernel: Kernel, compiled: TileSpec, cuts: str, rows: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the list that a rule makes of rows, for the compiled spec."""
    kv_lens, pages, cu_q_lens, num_seqs = rows
    spec = spec_of(kernel, num_tokens=compiled.num_tokens, max_num_seqs=len(kv_lens), cuts=cuts)
    return build_tiles(spec, cu_q_lens, kv_lens, num_seqs, None, pages)


def predicted_us(kernel: Kernel, compiled: TileSpec, tiles: np.ndarray) -> float:
    """Predict the time of a list: blocks and items of the busiest program, partial results, merge, launches.

    The constants follow from measured times of eleven lists of an H200 (`h200_prompt_kernels.txt`).
    """
    index = len(compiled.blocks.classes) - 1
    first = compiled.tiles_offset(index)
    table = tiles[first : first + NUM_FIELDS * int(tiles[index])].reshape(-1, NUM_FIELDS)
    blocks = -(-(table[:, KV_END] - table[:, KV_BEGIN]) // 128)
    is_part = table[:, SLOT] >= 0
    costs = np.repeat(blocks * kernel.block_us + _ITEM_US + _PART_US * is_part, compiled.num_kv_heads)
    rounds = np.concatenate([costs, np.zeros(-len(costs) % NUM_PROGRAMS)]).reshape(-1, NUM_PROGRAMS)
    rounds[1::2] = rounds[1::2, ::-1]
    merged_bytes = (
        is_part.sum() * compiled.num_kv_heads * compiled.blocks.classes[-1].rows * GQA10.head_dim * 4
    )
    found = rounds.sum(0).max() + 8 + (2.5 + merged_bytes / 4e6 if is_part.any() else 0)
    if kernel.scratch_pages:
        num_codes = int(tiles[NUM_DECODED]) * PAGE_SIZE * 2 * GQA10.num_kv_heads * GQA10.head_dim
        found += 3 + 3 * num_codes / 3.3e6
    return float(found)


def describe(name: str, cuts_name: str) -> str:
    """Return the name of a variant."""
    return f"{name}/{cuts_name}"


def flop_of(rows: Any) -> int:
    """Return the floating-point operations of rows of (query length, context)."""
    pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in rows)
    return 4 * pairs * GQA10.num_q_heads * GQA10.head_dim
