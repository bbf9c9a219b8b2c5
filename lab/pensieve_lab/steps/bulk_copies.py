"""Copy rates of chunks between device and pinned host memory on an idle machine.

Owns: the machine's ceilings (one large array, and batches of arrays like chunks), and the same bytes through
a runner's transfers. Does not know: engines.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.transfers.copy_batches import copy_arrays
from pensieve_lab.common.spread import Spread

_NUM_WARM_UPS = 2
WAYS = ("to host", "to device")


class BothWays(NamedTuple):
    """Times of copying the same bytes to the host and back, all devices together."""

    num_bytes: int
    to_host_s: Spread
    to_device_s: Spread

    def bytes_per_s(self) -> dict[str, float]:
        """Return the median rates by direction."""
        medians = self.to_host_s.median, self.to_device_s.median
        return {way: self.num_bytes / seconds for way, seconds in zip(WAYS, medians, strict=True)}


def large_array(runner: ModelRunner, num_bytes: int, repeats: int) -> BothWays:
    """Time one array of `num_bytes`, split over the devices."""
    mesh = runner.storage.sharding.mesh
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    num_elements = num_bytes // 4 // len(mesh.devices.flat) * len(mesh.devices.flat)
    array = jnp.zeros(num_elements, jnp.float32, device=sharding)
    pinned = sharding.with_memory_kind("pinned_host")
    return _both_ways([array], sharding, pinned, repeats)


def chunk_arrays(runner: ModelRunner, num_chunks: int, repeats: int) -> BothWays:
    """Time the arrays of `num_chunks` chunks, in one call per direction."""
    storage = runner.storage
    shapes = [storage.chunk_shape(group) for group in range(len(storage.groups))]
    arrays = [
        jnp.zeros(shape, storage.chunk_dtype, device=storage.sharding)
        for shape in shapes
        for _ in range(num_chunks)
    ]
    return _both_ways(arrays, storage.sharding, storage.host_sharding, repeats)


def _both_ways(
    arrays: list[jax.Array], sharding: NamedSharding, pinned: NamedSharding, repeats: int
) -> BothWays:
    out: list[float] = []
    back: list[float] = []
    jax.block_until_ready(arrays)
    for _ in range(_NUM_WARM_UPS + repeats):
        start_s = time.perf_counter()
        on_host = jax.block_until_ready(copy_arrays(arrays, pinned))
        middle_s = time.perf_counter()
        arrays = jax.block_until_ready(copy_arrays(on_host, sharding))
        out.append(middle_s - start_s)
        back.append(time.perf_counter() - middle_s)
        del on_host  # its memory is recycled by the next round
    num_bytes = sum(array.nbytes for array in arrays)
    return BothWays(num_bytes, Spread.of(out[_NUM_WARM_UPS:]), Spread.of(back[_NUM_WARM_UPS:]))


def through_transfers(runner: ModelRunner, num_chunks: int, repeats: int) -> BothWays:
    """Time pages 1 to `num_chunks` to as many slots and back by `runner.transfers`; no engine may use
    them."""
    transfers = runner.transfers
    ids = itertools.count()
    out: list[float] = []
    back: list[float] = []
    for _ in range(_NUM_WARM_UPS + repeats):
        for move, times in ((transfers.swap_out, out), (transfers.swap_in, back)):
            copies = [ChunkCopy(next(ids), index, index) for index in range(1, num_chunks + 1)]
            start_s = time.perf_counter()
            _move_all(runner, move, copies)
            times.append(time.perf_counter() - start_s)
    num_bytes = num_chunks * runner.storage.slot_bytes
    return BothWays(num_bytes, Spread.of(out[_NUM_WARM_UPS:]), Spread.of(back[_NUM_WARM_UPS:]))


def _move_all(
    runner: ModelRunner, move: Callable[[Sequence[ChunkCopy]], None], copies: list[ChunkCopy]
) -> None:
    """Start all copies at once, and wait until the last is complete and has taken effect."""
    transfers = runner.transfers
    left = {copy.copy_id for copy in copies}
    move(copies)
    left.difference_update(*transfers.completed())
    while left:
        transfers.wait()
        left.difference_update(*transfers.completed())
    jax.block_until_ready(runner.pools)
