"""Pools of random pages with transfers to and from them; a step is a small program per group of layers.

CPU devices have a GPU's memory kinds, so this runs the same code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from model_defs import make_mesh, preset
from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.config import CacheConfig
from pensieve_jax.device.kv_storage import DevicePools, KVStorage
from pensieve_jax.device.transfers.device_transfers import DeviceTransfers
from pensieve_jax.runtime.compilation import CompilationCounter, compile_all

GPU_PAGES, CPU_PAGES = 40, 30
MODEL = preset("llama-tiny", num_layers=3, head_dim=32)
CACHE = CacheConfig(gpu_pages=GPU_PAGES, cpu_pages=CPU_PAGES, chunk_tokens=16)


@functools.partial(jax.jit, donate_argnums=0)
def wreck(pools, pages):
    return [pool.at[pages].set(jnp.nan, mode="drop") for pool in pools]


class Bench:
    """Pools of random pages, and transfers from and to them."""

    def __init__(
        self, num_devices=1, dtype="float32", num_groups=2, bound=20, priority=True, *, pack_host=None
    ):
        mesh = make_mesh(num_devices)
        cache = dataclasses.replace(CACHE, pack_host=pack_host)
        self.storage = KVStorage(MODEL, cache, jnp.dtype(dtype), mesh, num_groups)
        self.pools = DevicePools(self.storage)
        self.pools.reset()
        self.transfers = DeviceTransfers(
            self.storage,
            self.pools,
            cpu_pages=CPU_PAGES,
            max_num_staged_pages=bound,
            retrieval_priority=priority,
        )
        self.preparations = [*self.transfers.grow(), *compile_all(self.transfers.jobs())]
        self.transfers.rehearse()
        rng = np.random.default_rng(3)
        values = [rng.standard_normal(self.storage.shape).astype(dtype) for _ in range(MODEL.num_layers)]
        self.fill(np.stack(values, axis=1))
        self.ids = itertools.count(1)
        self._wreck = [wreck.lower(pools, self._padded([])).compile() for pools in self.pools.groups]
        self.counter = CompilationCounter()

    def fill(self, content):
        """Fill the pools with [page, layer, ...]."""
        layers = [np.ascontiguousarray(content[:, layer]) for layer in range(MODEL.num_layers)]
        self.pools.replace([jax.device_put(layer, self.storage.sharding) for layer in layers])
        self.content = content

    @staticmethod
    def _padded(pages):
        return np.array([*pages, *[10**6] * (GPU_PAGES - len(pages))], np.int32)

    def step(self, wrecked_pages=()):
        """Dispatch a step that overwrites some pages."""
        self.transfers.start()
        for group, program in enumerate(self._wreck):
            self.transfers.land(group)
            self.pools.groups[group] = program(self.pools.groups[group], self._padded(wrecked_pages))

    def copies(self, pairs):
        return [ChunkCopy(next(self.ids), page, slot) for page, slot in pairs]

    def finish(self, copies):
        """Complete these copies and no other, without steps."""
        wanted = {copy.copy_id for copy in copies}
        while wanted:
            self.transfers.swap_out([])
            named = set(self.transfers.completed().arrived)
            assert named <= wanted
            wanted -= named
            if wanted:
                self.transfers.wait()

    def store(self, pairs):
        """Fill slots with the pages' chunks."""
        copies = self.copies(pairs)
        self.transfers.swap_out(copies)
        self.finish(copies)

    def page(self, page):
        return np.stack([np.asarray(pool)[page] for pool in self.pools.by_layer])  # compiles nothing

    def check(self, expected):
        """Check {page: the page whose initial content it now holds, None: NaN}; others are unchanged."""
        found = np.stack([np.asarray(pool) for pool in self.pools.by_layer], axis=1)
        for page in range(GPU_PAGES + 1):
            origin = expected.get(page, page)
            if origin is None:
                assert np.isnan(found[page]).all(), page
            else:
                np.testing.assert_array_equal(found[page], self.content[origin], err_msg=str(page))


def failing(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
