"""How chunks are divided into batches, and how one call copies a batch to another memory.

Owns: the batch sizes that have executables, and the only use of the jaxlib call below `jax.device_put`.
`device_put` spends 20 to 40 microseconds of Python on every array, even if given many at once; for the chunks
of one history that is milliseconds in every step that swaps. The jaxlib call that it ends in takes a tenth of
that. Where jaxlib has no such call, `device_put` is used.
Does not know: what the arrays are, or when they arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding
from jaxlib import xla_client

# A launch takes all pools of a group, on every device, which costs the host as much as ten to fifty of the
# chunks in it. So padding is cheaper than another launch, and any number of chunks has a size less than twice
# as large.
_SIZES = (4, 8, 16, 32, 64)
_copy_batch = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)


def batch_sizes(max_num_chunks: int) -> tuple[int, ...]:
    """Return the ascending batch sizes for at most `max_num_chunks` chunks at once."""
    largest = min(max_num_chunks, _SIZES[-1])
    return (*(size for size in _SIZES if size < largest), largest)


class CopyBatch(NamedTuple):
    """Chunks [start, stop) in a launch for `size` chunks."""

    start: int
    stop: int
    size: int


def max_padding(max_num_chunks: int) -> int:
    """Return the largest possible number of places in a batch that hold no chunk."""
    sizes = 0, *batch_sizes(max_num_chunks)
    return max(size - smaller for smaller, size in itertools.pairwise(sizes)) - 1


def batches(num_chunks: int, sizes: tuple[int, ...]) -> Iterator[CopyBatch]:
    """Yield as few batches as possible of the given `sizes`, in order."""
    for start in range(0, num_chunks, sizes[-1]):
        stop = min(start + sizes[-1], num_chunks)
        yield CopyBatch(start, stop, next(size for size in sizes if size >= stop - start))


def copy_arrays(arrays: Sequence[jax.Array], sharding: NamedSharding) -> list[jax.Array]:
    """Return the arrays in the memory and on the devices of `sharding`; asynchronous, in the given order.

    Args:
      arrays: arrays that are already split over the same devices in the same way.
      sharding: a sharding that differs from theirs only in its memory kind.

    Raises:
      jax.errors.JaxRuntimeError: a copy could not be started.
    """
    if _copy_batch is None or not arrays:
        return jax.device_put(list(arrays), sharding)
    devices = xla_client.DeviceList(tuple(sharding.mesh.devices.flat))
    count = len(arrays)
    keep = xla_client.ArrayCopySemantics.REUSE_INPUT
    copied: list[jax.Array] = _copy_batch(list(arrays), [devices] * count, [sharding] * count, [keep] * count)
    return copied
