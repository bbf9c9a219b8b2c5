"""Into how many parts the kernel cuts a row's columns, and how many of them it takes at once.

Owns: the numbers, and the choice by shape and device, by what `benchmark_ring_decode` measured on
an H200. Does not know: what a kernel does with them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.devices import has_large_shared_memory

MAX_NUM_SPLITS = 32
"""What the merge holds at once."""
MIN_BLOCK_KV = 16
"""Columns of the narrowest product that Triton has."""

_NUM_MULTIPROCESSORS = 132  # of Hopper GPUs
_PROGRAMS_EACH = 2  # at least; less than twice as many, as splits are a power of two
_MIN_SPLIT_COLUMNS = 256  # of a part of a row as long as the ring


class DecodeBlock(NamedTuple):
    """How the kernel is cut and compiled; hashable.

    Attributes:
      block_kv: columns per iteration; a power of two from 16.
      num_warps: warps of a program.
      num_stages: depth of the software pipeline.
      num_splits: parts into which a row's columns are cut, each a program's; at most `MAX_NUM_SPLITS`.
      whole_loop: blocks that lie in the part whole take a loop of their own, without masks.
    """

    block_kv: int
    num_warps: int
    num_stages: int
    num_splits: int
    whole_loop: bool = True


def default_block(
    *,
    batch: int,
    num_kv_heads: int,
    length: int,
    head_dim: int,
    itemsize: int,
    device: jax.Device | None = None,
) -> DecodeBlock:
    """The choice for a ring of this shape on `device`; None: the first one.

    Programs fill the multiprocessors two to four times. Rows are of different lengths, and a short row's
    programs make room for those of a long one.

    A pipeline holds `num_stages` blocks of keys and of values in shared memory: up to 128 KiB where a program
    may have so much, and 64 KiB elsewhere: narrow blocks in a deep pipeline, which on an H200 take a sixth
    longer where rows are of mixed lengths. GPUs of little shared memory have not been measured.
    """
    num_splits = 1
    wanted = _PROGRAMS_EACH * _NUM_MULTIPROCESSORS
    most = min(MAX_NUM_SPLITS, length // _MIN_SPLIT_COLUMNS)
    while batch * num_kv_heads * num_splits < wanted and 2 * num_splits <= most:
        num_splits *= 2
    if itemsize == 4:  # without tensor cores operands live in registers
        return DecodeBlock(32 if head_dim <= 64 else 16, 4, 2, num_splits, whole_loop=False)
    if has_large_shared_memory(device or jax.devices()[0]):
        return DecodeBlock(128 if head_dim <= 128 else 64, 4, 2, num_splits)
    return DecodeBlock(32, 2, 4, num_splits) if head_dim <= 128 else DecodeBlock(32, 4, 2, num_splits)
