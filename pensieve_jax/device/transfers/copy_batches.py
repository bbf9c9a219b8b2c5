"""How chunks are cut into batches, and how a batch goes to another memory in one call.

Owns: the sizes of batches, for which there are executables, and the one use of what lies below
`jax.device_put`. That spends 20 to 40 microseconds of Python on every array, whatever it is given at once,
which for the chunks of one history is milliseconds of every step that swaps; the call of jaxlib that it ends
in takes a tenth of that. Where jaxlib has no such call, `device_put` does the same.
Does not know: what the arrays are, or when they arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding
from jaxlib import xla_client

# A launch takes all pools of a group, on every device, which costs the host as much as ten to fifty chunks in
# it do. So there is padding rather than another launch, and a size for any number that is
# less than twice as large.
_SIZES = (4, 8, 16, 32, 64)
_copy_batch = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)


def batch_sizes(max_num_chunks: int) -> tuple[int, ...]:
    """The sizes, ascending, where no more than so many chunks are moved at once."""
    largest = min(max_num_chunks, _SIZES[-1])
    return (*(size for size in _SIZES if size < largest), largest)


class CopyBatch(NamedTuple):
    """Chunks [start, stop), in a launch of `size`."""

    start: int
    stop: int
    size: int


def max_padding(max_num_chunks: int) -> int:
    """The most places of a batch that hold no chunk."""
    sizes = 0, *batch_sizes(max_num_chunks)
    return max(size - smaller for smaller, size in itertools.pairwise(sizes)) - 1


def batches(num_chunks: int, sizes: tuple[int, ...]) -> Iterator[CopyBatch]:
    """As few as can be of `sizes`, in order."""
    for start in range(0, num_chunks, sizes[-1]):
        stop = min(start + sizes[-1], num_chunks)
        yield CopyBatch(start, stop, next(size for size in sizes if size >= stop - start))


def copy_arrays(arrays: Sequence[jax.Array], sharding: NamedSharding) -> list[jax.Array]:
    """The arrays in the memory and on the devices of `sharding`; asynchronous, in the order given.

    Args:
      arrays: each split over the same devices in the same way already.
      sharding: that differs from theirs in its memory kind only.

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
