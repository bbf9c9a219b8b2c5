"""Block sizes of the kernel: the number of parts of a row's columns, and the columns per iteration.

Owns: the numbers, and the choice by shape and device, which `benchmark_ring_decode` measured on an H200.
Does not know: what a kernel does with them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.devices import has_large_shared_memory

MAX_NUM_SPLITS = 32
"""Most parts that the merge can hold at once."""
MIN_BLOCK_KV = 16
"""Columns of Triton's narrowest product."""

_NUM_MULTIPROCESSORS = 132  # of Hopper GPUs
_PROGRAMS_EACH = 2  # the least per multiprocessor; below 4, since the number of splits is a power of two
_MIN_SPLIT_COLUMNS = 256  # columns of a part, for a row as long as the ring


class DecodeBlock(NamedTuple):
    """Block sizes and compile options of the kernel; hashable.

    Attributes:
      block_kv: columns per iteration; a power of two from 16.
      num_warps: warps of a program.
      num_stages: depth of the software pipeline.
      num_splits: parts of a row's columns, one program each; at most `MAX_NUM_SPLITS`.
      whole_loop: blocks entirely inside the part are computed in a separate loop without masks.
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
    """Return the block for a ring of this shape on `device`; None means the first device.

    Programs fill the multiprocessors two to four times. Rows differ in length, and the programs of a short
    row make room for those of a long one.

    A pipeline holds `num_stages` blocks of keys and of values in shared memory: up to 128 KiB if a program
    may use that much, and 64 KiB otherwise, with narrow blocks in a deep pipeline. On an H200 the latter
    takes a sixth longer if row lengths are mixed. GPUs with little shared memory have not been measured.
    """
    num_splits = 1
    wanted = _PROGRAMS_EACH * _NUM_MULTIPROCESSORS
    most = min(MAX_NUM_SPLITS, length // _MIN_SPLIT_COLUMNS)
    while batch * num_kv_heads * num_splits < wanted and 2 * num_splits <= most:
        num_splits *= 2
    if itemsize == 4:  # without tensor cores operands are in registers
        return DecodeBlock(32 if head_dim <= 64 else 16, 4, 2, num_splits, whole_loop=False)
    if has_large_shared_memory(device or jax.devices()[0]):
        return DecodeBlock(128 if head_dim <= 128 else 64, 4, 2, num_splits)
    return DecodeBlock(32, 2, 4, num_splits) if head_dim <= 128 else DecodeBlock(32, 4, 2, num_splits)
