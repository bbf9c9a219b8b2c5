"""Block sizes of the tiled back ends: the tile classes of a step of a given shape.

Owns: the numbers, which come from `benchmark_kernels --sweep`. Does not know: what a kernel does with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileClass:
    """One size of query tile, with the compile options of its kernel and the splits of its key ranges.

    Attributes:
      rows: rows of the query tile, tokens times grouped heads; a power of two from 16, or 8 `in_bytes`.
      block_kv: keys per iteration; a power of two from 16.
      num_warps: warps of a program.
      num_stages: depth of the software pipeline.
      min_split_kv: keys below which a tile's key range is never split.
      target_programs: programs, over all KV heads, beyond which more splits gain nothing.
      whole_loop: blocks that every query sees entirely are computed in a separate loop without masks.
      mosaic: its kernel is the Mosaic one, and its rows are in head-major order (see `mosaic_class`).
      in_bytes: its kernel is a Mosaic one for pages in 8 bits: for prompts if `mosaic` is set as well (see
        `byte_prompt_class`), otherwise for decoding (see `byte_class`).
      fills_rounds: where this is faster, wide tiles that fill rounds of programs stay whole, and only the
        rest of them is split (`tile_lists`). Otherwise every range above one length is split.
    """

    rows: int
    block_kv: int
    num_warps: int
    num_stages: int
    min_split_kv: int
    target_programs: int
    whole_loop: bool = True
    mosaic: bool = False
    in_bytes: bool = False
    fills_rounds: bool = False

    @property
    def decodes_bytes(self) -> bool:
        """Whether its kernel is the Mosaic one for decoding over pages in 8 bits."""
        return self.in_bytes and not self.mosaic


@dataclass(frozen=True)
class BlockSizes:
    """Tile classes of a step, by ascending rows; a query range belongs to the first class that holds it."""

    classes: tuple[TileClass, ...]


def mosaic_class(
    rows: int,
    block_kv: int,
    num_stages: int,
    min_split_kv: int,
    target_programs: int,
    *,
    fills_rounds: bool = False,
) -> TileClass:
    """Return a class of the Mosaic kernel: 64 rows per computing warpgroup, and one warpgroup that fetches.

    Args:
      rows: 64 or 128.
      block_kv: keys per iteration, 64 or 128.
      num_stages: blocks of keys and of values in shared memory.
      min_split_kv: as in `TileClass`.
      target_programs: as in `TileClass`; here the items that a fixed number of programs share.
      fills_rounds: as in `TileClass`.
    """
    num_warps = 4 * (rows // 64 + 1)
    sizes = (rows, block_kv, num_warps, num_stages, min_split_kv, target_programs)
    return TileClass(*sizes, mosaic=True, fills_rounds=fills_rounds)


def byte_class(
    rows: int, block_kv: int, num_pairs: int, num_stages: int, min_split_kv: int, target_programs: int
) -> TileClass:
    """Return a class of the Mosaic kernel for decoding pages in 8 bits.

    Shared memory must hold the stages of all pairs.

    Args:
      rows: 8 or 16.
      block_kv: keys per iteration, 64 or 128.
      num_pairs: pairs of a fetching and a computing warpgroup in a program; 1 to 3.
      num_stages: blocks of a pair in shared memory.
      min_split_kv: as in `TileClass`.
      target_programs: as in `TileClass`; here the items that a fixed number of pairs share.
    """
    sizes = (rows, block_kv, 8 * num_pairs, num_stages, min_split_kv, target_programs)
    return TileClass(*sizes, in_bytes=True)


def byte_prompt_class(
    rows: int,
    block_kv: int,
    num_stages: int,
    min_split_kv: int,
    target_programs: int,
    *,
    fills_rounds: bool = False,
) -> TileClass:
    """Return a class as `mosaic_class` does, for pages in 8 bits, with one more warpgroup that converts.

    Args:
      rows: 64 or 128.
      block_kv: keys per iteration, 64 or 128.
      num_stages: converted blocks of keys and of values in shared memory; codes use the rest.
      min_split_kv: as in `TileClass`.
      target_programs: as in `mosaic_class`.
      fills_rounds: as in `TileClass`.
    """
    num_warps = 4 * (rows // 64 + 2)
    sizes = (rows, block_kv, num_warps, num_stages, min_split_kv, target_programs)
    return TileClass(*sizes, mosaic=True, in_bytes=True, fills_rounds=fills_rounds)


_PROMPTS = mosaic_class(128, 128, 2, 1024, 264, fills_rounds=True)
# Unless pages are in 8 bits, Triton computes steps of at most this many tokens, or with fewer decoding tiles
# than two for each program.
_MOSAIC_HARDLY_ANY_TOKENS, _MOSAIC_MIN_TILES = 16, 264
# Most query tokens of a step in which the smaller Mosaic class also computes prompts.
_MOSAIC_FEW_TOKENS = 256
# Most parts of a key range: merging them is serial.
MAX_NUM_SPLITS = 32
# Query rows that one program of the merge kernel handles.
MERGE_ROWS = 16


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def default_block_sizes(
    *,
    num_tokens: int,
    max_num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    mosaic: bool = False,
    in_bytes: bool = False,
    large_shared_memory: bool = True,
    has_scratch: bool = False,
) -> BlockSizes:
    """Return the measured choice for a step of this shape.

    Small tiles are for decoding and for short queries, and are bound by memory. Large tiles are for prompts,
    and are bound by arithmetic. A step with very few tokens has only small tiles, which saves a launch. With
    `mosaic`, the Mosaic kernel computes both, except in steps with hardly any tokens; in small steps its
    small tiles also compute short prompts. With `in_bytes` as well, pages are in 8 bits, and two other Mosaic
    kernels compute decoding and the rest; with `has_scratch`, the kernel for 16 bits computes long prompts,
    whose pages are decoded first.

    Heads over 128 elements need up to 132 KiB of shared memory in a pipeline of four stages, or in tiles of
    128 rows. Without `large_shared_memory` there are at most two stages and 64 rows, in 68 KiB. No such GPU
    has been measured.
    """
    group = num_q_heads // num_kv_heads
    small_rows = max(16, power_of_two(group))
    if itemsize == 4:
        return _float32_block_sizes(small_rows, head_dim)
    must_save = head_dim > 128 and not large_shared_memory
    # For rows of a few tokens (a prompt's tail) one tile of 32 reads the keys once, two tiles of 16 twice.
    if num_tokens <= 512 and small_rows < group * num_tokens // max_num_seqs <= 32:
        small_rows = 32
    small = TileClass(
        rows=small_rows,
        block_kv=32,
        num_warps=2,
        num_stages=2 if must_save else 4,
        min_split_kv=256,
        target_programs=2048,
        whole_loop=True,
    )
    enough = num_tokens > _MOSAIC_HARDLY_ANY_TOKENS and num_tokens * num_kv_heads >= _MOSAIC_MIN_TILES
    if mosaic and in_bytes:
        return _byte_block_sizes(group, num_tokens, has_scratch)
    if mosaic and enough:
        # Shared memory holds one computing warpgroup with three blocks each of 128 keys and values, or two
        # with two. There are two items for each program: a prompt of 2048 tokens has enough without splits.
        # Four were more even, but cost the prompt more in merges than they saved (lab/log/2026-11.md).
        few, many = mosaic_class(64, 128, 3, 256, 264), _PROMPTS
        return BlockSizes((few,) if num_tokens <= _MOSAIC_FEW_TOKENS else (few, many))
    if num_tokens * group <= 4 * small_rows or small_rows >= (64 if must_save else 128):
        return BlockSizes((small,))
    return BlockSizes((small, _large(max(128 if head_dim <= 128 else 64, 2 * small_rows), head_dim, 528)))


def _large(rows: int, head_dim: int, target_programs: int) -> TileClass:
    """Return Triton's class for prompts."""
    return TileClass(
        rows=rows,
        block_kv=64 if head_dim <= 128 else 32,  # two or three blocks of K and V must fit shared memory
        num_warps=8 if rows >= 128 else 4,
        num_stages=3 if head_dim <= 128 else 2,
        min_split_kv=1024,
        target_programs=target_programs,
    )


def _byte_block_sizes(group: int, num_tokens: int, has_scratch: bool) -> BlockSizes:
    """Return the classes for pages in 8 bits: decoding by two pairs, and prompts by the kernel that converts.

    A launch for prompts costs time even without a prompt, so a step with hardly any tokens has none.
    """
    has_hardly_any_tokens = num_tokens <= _MOSAIC_HARDLY_ANY_TOKENS
    min_split_kv = 128 if has_hardly_any_tokens else 256
    if group <= 8:
        small = byte_class(8, 128, 2, 3, min_split_kv, 264)
    else:
        small = byte_class(16, 64, 2, 5, min_split_kv, 264)
    if has_hardly_any_tokens:
        return BlockSizes((small,))
    # Triton's kernel takes two to three times as long for a prompt, so groups that need padding to a power of
    # two use this kernel, too.
    if num_tokens <= _MOSAIC_FEW_TOKENS:
        return BlockSizes((small, byte_prompt_class(64, 128, 2, 256, 264)))
    many = byte_prompt_class(128, 64, 3, 1024, 264, fills_rounds=True)
    return BlockSizes((small, many, _PROMPTS) if has_scratch else (small, many))


def _float32_block_sizes(rows: int, head_dim: int) -> BlockSizes:
    """Return one class of small tiles: without tensor cores a tile's operands are in registers."""
    return BlockSizes(
        (
            TileClass(
                rows=rows,
                block_kv=32 if head_dim <= 64 else 16,
                num_warps=4 if rows <= 16 else 8,
                num_stages=2,
                min_split_kv=256,
                target_programs=1024,
                whole_loop=False,
            ),
        )
    )
