"""Rings of random numbers for timing, since a device reads zeros faster than other data.

Owns: replacing a runner's ring in place, without more memory than the ring; all rows are alike.
Does not know: what is timed on it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.launches import Resize
from pensieve_jax.rebatching.ring_shapes import RingShape


def fill(runner: DeviceRunner, shape: RingShape) -> None:
    """Give the runner a ring of this shape with random numbers, and wait for it."""
    runner.launch(Resize(shape, None))
    ring = runner.ring
    assert ring is not None
    layer = runner.storage.layer(shape)
    make = _maker(layer.shape, layer.dtype, layer.sharding)
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(ring.keys)))
    for pools in (ring.keys, ring.values):
        for index in range(len(pools)):
            pools[index] = None  # type: ignore[call-overload]  # freed before the new one is made
            pools[index] = make(next(keys))
    jax.block_until_ready(ring)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    def make(key: jax.Array) -> jax.Array:
        return jax.numpy.broadcast_to(jax.random.normal(key, (1, *shape[1:]), dtype), shape)

    return jax.jit(make, out_shardings=sharding)
