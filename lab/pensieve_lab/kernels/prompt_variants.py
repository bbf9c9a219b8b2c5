"""Variants of the kernel for prompts: how it is compiled, and by which lists of tiles its work is divided.

Owns: the variants, the function of each, and a model of their time, from which predictions come.
Does not know: how a variant is timed or checked. Called by `benchmark_prompts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    TileSpec,
    api,
    build_tiles,
    byte_class,
    byte_prompt_class,
    mosaic_class,
    mosaic_compute,
    mosaic_convert,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.pallas_triton_scratch import decode_pages
from pallas_kernels.ragged_paged_attention.shapes import GQA10
from pallas_kernels.ragged_paged_attention.tile_lists import KV_BEGIN, KV_END, SLOT
from pallas_kernels.ragged_paged_attention.tile_specs import HEADER_LEN, NUM_FIELDS, NUM_PROGRAMS

PAGE_SIZE = 32
_SCALE = 1 / math.sqrt(GQA10.head_dim)
# Compiled for as many slots as the finest list needs, so that one program serves all lists.
_MOST_PROGRAMS = 528


class Kernel(NamedTuple):
    """A compiled form of the kernel.

    Attributes:
      prompts: the class for prompts.
      block_us: predicted microseconds of a block of 128 keys.
      kv_dtype: format of the pages.
      in_halves: products in float16; queries and results are converted outside.
      in_scratch: the pages of the rows are first decoded into a bfloat16 pool.
      item_us: predicted microseconds of an item besides its blocks.
      without: what the kernel leaves out, one of `WITHOUT`; its answers are wrong, and its time shows what
        the rest takes.
      is_alone: without the class for decoding, whose launch is empty here.
    """

    prompts: TileClass
    block_us: float
    kv_dtype: str | None = None
    in_halves: bool = False
    in_scratch: bool = False
    item_us: float = 3.4
    without: str = ""
    is_alone: bool = False

    @property
    def pages_dtype(self) -> str | None:
        """Format of the pages that the kernel itself reads."""
        return None if self.in_scratch else self.kv_dtype


class Cuts(NamedTuple):
    """A rule for lists of tiles: the fields of a `TileClass` with these names."""

    cuts: str
    target_programs: int
    min_split_kv: int


_PLAIN = mosaic_class(128, 128, 2, 1024, _MOST_PROGRAMS)
_BYTES = byte_prompt_class(128, 64, 3, 1024, _MOST_PROGRAMS)
_TWO = dataclasses.replace(_BYTES, num_converters=2, num_warps=20)
KERNELS: dict[str, Kernel] = {
    "bf16": Kernel(_PLAIN, 1.74),
    "bf16_lazy": Kernel(dataclasses.replace(_PLAIN, lazy_rescale=True), 1.67),
    "int8": Kernel(_BYTES, 2.70, "int8"),
    "int8_scratch": Kernel(_PLAIN, 1.74, "int8", in_scratch=True),
    "int8_two": Kernel(_TWO, 2.05, "int8"),
    "int8_halves_two": Kernel(_TWO, 1.95, "int8", in_halves=True),
    "int8_halves": Kernel(_BYTES, 2.10, "int8", in_halves=True),
    "int8_halves_two_lazy": Kernel(
        dataclasses.replace(_TWO, lazy_rescale=True), 1.88, "int8", in_halves=True
    ),
    "bf16_alone": Kernel(_PLAIN, 1.74, is_alone=True),
    "bf16_no_softmax": Kernel(dataclasses.replace(_PLAIN, min_split_kv=1023), 1.25, without="softmax"),
    "int8_no_conversion": Kernel(
        dataclasses.replace(_BYTES, min_split_kv=1022), 1.85, "int8", without="conversion"
    ),
}
# Timed also without history and in decoding; the others are for prompts behind histories.
EVERYWHERE = ("bf16", "bf16_lazy", "int8")
WITHOUT = ("softmax", "conversion")
CUTS: dict[str, Cuts] = {
    "today": Cuts("wide", 264, 1024),
    "finer": Cuts("wide", 528, 1024),
    "finer_by_part": Cuts("wide_by_part", 528, 1024),
    "rest": Cuts("rest", 264, 512),
}


def spec_of(kernel: Kernel, *, num_tokens: int, max_num_seqs: int, cuts: Cuts | None = None) -> TileSpec:
    """Return the spec that the kernel is compiled for, or with `cuts` that of a list."""
    prompts = kernel.prompts
    if cuts is not None:
        prompts = dataclasses.replace(prompts, **cuts._asdict())
    small: tuple[TileClass, ...] = (mosaic_class(64, 128, 3, 256, 264),)
    if kernel.pages_dtype is not None:  # the kernel for decoding takes no float16
        small = () if kernel.in_halves else (byte_class(8, 128, 2, 3, 256, 264),)
    if kernel.is_alone:
        small = ()
    return tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=GQA10.num_q_heads,
        num_kv_heads=GQA10.num_kv_heads, head_dim=GQA10.head_dim, page_size=PAGE_SIZE, dtype="bfloat16",
        backend="pallas_mosaic_gpu", blocks=BlockSizes((*small, prompts)), kv_dtype=kernel.pages_dtype,
    )  # fmt: skip


@contextlib.contextmanager
def leaving_out(without: str) -> Iterator[None]:
    """Trace kernels without a part of their work. Traces are kept by class, so the class must be unique."""
    with contextlib.ExitStack() as patches:
        if without == "softmax":
            patches.enter_context(mock.patch.object(mosaic_compute._Rows, "weigh", _scores_as_weights))
            patches.enter_context(mock.patch.object(mosaic_compute._Rows, "rescale", lambda _, acc, __: acc))
        elif without:
            patches.enter_context(mock.patch.object(mosaic_convert, "convert_rows", lambda *_: None))
        yield


def _scores_as_weights(rows: Any, scores: Any, m: Any, block: Any, *, masked: bool) -> Any:
    del masked
    rows.free_keys(block)
    return m, m, scores, mosaic_compute._in_threads(jnp.add, scores[:, :16])


def function_of(kernel: Kernel, spec: TileSpec) -> Callable[..., jax.Array]:
    """Return attention of (q, pool, tiles, kv_lens, page_indices, cu_q_lens, num_seqs)."""

    def attend(q: jax.Array, pool: jax.Array, tiles: jax.Array, *rows: jax.Array) -> jax.Array:
        kv_lens, pages, cu_q_lens, num_seqs = rows
        if kernel.in_scratch:
            assert kernel.kv_dtype is not None
            pool, pages = decode_pages(
                pool, kv_lens, pages, kv_dtype=kernel.kv_dtype, page_size=PAGE_SIZE, dtype=q.dtype
            )
        given = q.astype(jnp.float16) if kernel.in_halves else q
        arrays = (given, pool, kv_lens, pages, cu_q_lens, num_seqs)
        found = api._dispatch(spec, arrays, sm_scale=_SCALE, metadata=(spec, tiles), interpret=False)
        return found.astype(q.dtype)

    return attend


def tiles_of(kernel: Kernel, compiled: TileSpec, cuts: Cuts, rows: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the list that `cuts` makes of rows, laid out for the compiled spec."""
    kv_lens, _, cu_q_lens, num_seqs = rows
    spec = spec_of(kernel, num_tokens=compiled.num_tokens, max_num_seqs=len(kv_lens), cuts=cuts)
    made = build_tiles(spec, cu_q_lens, kv_lens, num_seqs)
    found = np.zeros(compiled.tiles_len, np.int32)
    found[:HEADER_LEN] = made[:HEADER_LEN]
    for index in range(len(spec.blocks.classes) + 1):
        length = NUM_FIELDS * int(made[index])
        source, target = spec.tiles_offset(index), compiled.tiles_offset(index)
        found[target : target + length] = made[source : source + length]
    return found


def predicted_us(
    kernel: Kernel, compiled: TileSpec, tiles: np.ndarray, rows: tuple[np.ndarray, ...]
) -> float:
    """Predict the time of a list: blocks and items of the busiest program, partial results, merge, launches.

    The constants follow from measured times of eleven lists of an H200 (`h200_prompt_kernels.txt`).
    """
    index = len(compiled.blocks.classes) - 1
    first = compiled.tiles_offset(index)
    table = tiles[first : first + NUM_FIELDS * int(tiles[index])].reshape(-1, NUM_FIELDS)
    blocks = -(-(table[:, KV_END] - table[:, KV_BEGIN]) // 128)
    is_part = table[:, SLOT] >= 0
    costs = np.repeat(blocks * kernel.block_us + kernel.item_us + 2.5 * is_part, compiled.num_kv_heads)
    rounds = np.concatenate([costs, np.zeros(-len(costs) % NUM_PROGRAMS)]).reshape(-1, NUM_PROGRAMS)
    rounds[1::2] = rounds[1::2, ::-1]
    merged_bytes = is_part.sum() * compiled.num_kv_heads * kernel.prompts.rows * GQA10.head_dim * 4
    found = rounds.sum(0).max() + 8 + (2.5 + merged_bytes / 4e6 if is_part.any() else 0)
    if kernel.in_scratch:
        num_codes = int(rows[0].sum()) * 2 * GQA10.num_kv_heads * GQA10.head_dim
        found += 3 + 3 * num_codes / 3.3e6
    if kernel.in_halves:
        found += 4 + 6 * compiled.num_tokens * GQA10.num_q_heads * GQA10.head_dim / 3.3e6
    return float(found)


def describe(name: str, cuts_name: str) -> str:
    """Return the name of a variant."""
    return f"{name}/{cuts_name}"


def flop_of(rows: Any) -> int:
    """Return the floating-point operations of rows of (query length, context)."""
    pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in rows)
    return 4 * pairs * GQA10.num_q_heads * GQA10.head_dim
