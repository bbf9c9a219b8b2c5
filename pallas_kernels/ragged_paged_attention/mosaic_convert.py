"""Conversion of pages in 8 bits to operands: a warpgroup of the Mosaic kernel for prompts.

Owns: the conversion of a block of codes and scales to keys or values in bfloat16, where products read them,
and the work of each thread. Does not know: how codes reach shared memory, or what is computed with the result
(`mosaic_compute`, as in the kernel for 16 bits). Called by: `pallas_mosaic_gpu`.

A prompt's tile has 128 rows, so each converted code is used in many products, and simple steps suffice. A
code becomes float32, is multiplied by its row's scale, and is rounded once to bfloat16, as a page in 16 bits
would hold it. Decoding does not round (`mosaic_byte_lanes`).

A warp has a quarter of a block's rows, and reads four at a time. Lane 8 p + c reads 16 codes of one row:
chunk c of row p, or of row p ^ 1 if c > 3. So eight lanes that load or store 16 bytes each use all banks.
They load different chunks. Their stores go to two squares of 64 columns; from a single row, they would
conflict in pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.interpreted_threads import run_interpreted
from pallas_kernels.ragged_paged_attention.mosaic_byte_lanes import HEAD_DIM, NUM_WARPS
from pallas_kernels.ragged_paged_attention.mosaic_launch import (
    TILES,
    BlockRing,
    Codes,
    Inputs,
    Item,
    KernelLaunch,
    Shared,
    for_each_item,
)
from pallas_kernels.ragged_paged_attention.mosaic_threads import run_threads

_ROWS = 4  # rows of a warp's load
_AHEAD = 2  # loads in flight
# Inserted as the second byte of 2^15 in float32, a code with its sign bit flipped adds itself plus 128.
# Either product with a bfloat16 needs at most 24 bits, so the multiply-add that subtracts them is exact.
_BIAS, _FLIPPED_SIGNS = float(2**15 + 128), 0x80808080 - (1 << 32)
_BIAS_BYTES = 0x4700


def convert(launch: KernelLaunch, inputs: Inputs, shared: Shared, codes: Codes, program: Any) -> None:
    """Convert keys and values of all items of a program as codes arrive and stages become free.

    Keys are one block ahead of values, in the order in which they are needed and their stages become free. So
    the values of an item's last block are converted with the next item that has keys. An item without keys in
    between would wait forever; therefore `tile_lists` puts these last.
    """
    keys, values = zip(codes, shared.rings, strict=True)
    for stage in range(launch.num_code_stages):
        for source in codes:
            plgpu.barrier_arrive(source.free.at[stage])

    def convert_item(_i: Any, item: Item, blocks_before: Any) -> None:
        @pl.loop(0, item.num_blocks(launch))
        def convert_block(n: Any) -> None:
            block = blocks_before + n
            _convert(launch, *keys, block)
            pl.when(block > 0)(lambda: _convert(launch, *values, block - 1))

    _, num_blocks = for_each_item(launch, inputs, program, convert_item)
    pl.when(num_blocks > 0)(lambda: _convert(launch, *values, num_blocks - 1))
    # Wait for every arrival, also the last ones.
    for stage in range(launch.tile_class.num_stages):
        for target in shared.rings:
            plgpu.barrier_wait(target.free.at[stage])


def _convert(launch: KernelLaunch, source: BlockRing, target: BlockRing, block: Any) -> None:
    """Convert the keys, or the values, of a block; blocks are counted over all items."""
    kv_dtype = launch.spec.kv_dtype
    assert kv_dtype is not None
    rows = CodeRows(kv_dtype, launch.spec.page_size, launch.tile_class.block_kv)
    stage, code_stage = launch.stage_of(block), launch.code_stage_of(block)
    program: Callable[..., Any] = lambda threads, refs, *_: convert_rows(threads, rows, *refs)  # noqa: E731
    refs = [source.blocks.at[code_stage], source.scales.at[code_stage], target.blocks.at[stage]]
    plgpu.barrier_wait(source.ready.at[code_stage])
    plgpu.barrier_wait(target.free.at[stage])
    if launch.interpret:
        run_interpreted(program, refs, [], [], None)
    else:
        run_threads(program, list(zip(refs, ((), (), TILES), strict=True)), [], [], None)
    plgpu.commit_smem()  # products read through another path (async proxy) than threads write
    plgpu.barrier_arrive(target.ready.at[stage])
    plgpu.barrier_arrive(source.free.at[code_stage])


@dataclass(frozen=True)
class CodeRows:
    """Static parameters of a block: the pages' format, the tokens of a page, and the block's keys."""

    kv_dtype: str
    page_size: int
    block_kv: int

    @property
    def warp_keys(self) -> int:
        """Keys of a block for one warp."""
        return self.block_kv // NUM_WARPS


def convert_rows(threads: Any, rows: CodeRows, codes: Any, scales: Any, target: Any) -> None:
    """Write bf16 numbers to `target`; this is the program of one lane.

    Args:
      threads: the operations of a thread.
      rows: static parameters.
      codes: i8[block_kv, 128] in shared memory.
      scales: i8[pages, 128] in shared memory, the scale rows of pages.
      target: bf16[block_kv, 128] in shared memory, as an operand.
    """
    begin = threads.warp * rows.warp_keys
    own_scale = _scale_of(threads, rows, scales, begin + (threads.lane & (rows.warp_keys - 1)))
    chunk = threads.lane & 7
    row = (threads.lane >> 3) ^ (chunk >> 2)
    # Slots of the first eight rows; later rows are a constant further.
    slots = [
        [threads.operand_slot(begin + row + first, chunk * 2 + h) for h in range(2)] for first in (0, _ROWS)
    ]
    start = (begin + row) * HEAD_DIM + chunk * 16

    def load(first: int) -> tuple[Any, list[Any]]:
        return threads.shuffle(own_scale, row + first), threads.load_words(codes, start + first * HEAD_DIM)

    # Compilers do not move loads across stores, so loads are issued ahead here.
    firsts = range(0, rows.warp_keys, _ROWS)
    loaded = [load(first) for first in firsts[:_AHEAD]]
    for i, first in enumerate(firsts):
        loaded += [load(ahead) for ahead in firsts[i + _AHEAD : i + _AHEAD + 1]]
        scale, words = loaded[i]
        pairs = [pair for word in words for pair in _numbers(threads, rows.kv_dtype, word, scale)]
        for h in range(2):
            slot = slots[i % 2][h] + 2 * HEAD_DIM * (first & ~7)
            threads.store_words(target, slot, pairs[4 * h : 4 * h + 4])


def _scale_of(threads: Any, rows: CodeRows, scales: Any, key: Any) -> Any:
    """Return the scale of one row, of a key or a value, f32."""
    bits = rows.page_size.bit_length() - 1
    start = (key >> bits) * HEAD_DIM + (key & (rows.page_size - 1))
    high, low = (threads.load_byte(scales, start + i * rows.page_size) for i in range(2))
    return threads.as_float(threads.permute_bytes(low, high, 0x4011))


def _numbers(threads: Any, kv_dtype: str, word: Any, scale: Any) -> list[Any]:
    """Return four codes times a scale, as two pairs of bfloat16."""
    if kv_dtype == "int8":
        word, bias = word ^ _FLIPPED_SIGNS, scale * -_BIAS
        wide = [threads.permute_bytes(word, _BIAS_BYTES, 0x5404 | i << 4) for i in range(4)]
        floats = [threads.multiply_add_floats(threads.as_float(x), scale, bias) for x in wide]
    else:
        halves = [threads.halves_of_e4m3(word, which) for which in range(2)]
        floats = [threads.float_of_half(pair, which) * scale for pair in halves for which in range(2)]
    return [threads.pack_bfloat16(*floats[i : i + 2]) for i in (0, 2)]
