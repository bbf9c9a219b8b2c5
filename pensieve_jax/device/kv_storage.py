"""KV state in memory: pages of the device's pools, chunks of host memory, and the pools themselves.

Owns: shape, dtype and placement of pages and chunks, whether chunks are packed, the groups of layers that
they are split into, and the current pool arrays. These arrays are the only mutable place for KV state on the
device. Steps and page copies take a group's pools, donate them, and store the updated ones for the next
program, so program order is call order.
Does not know: which page holds which chunk (the cache manager does), or how attention reads a page.

There is one pool array per layer, because each layer's KV write updates its pool in place; a page has the
same index in all of them. Page 0 is a dummy, in addition to the pages that the cache manages. Outside the
pools a chunk is one array per group of layers, since small copies are slow. A packed chunk is an array of
bytes with fewer rows; it is handled like any other chunk.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import LayerKind, ModelConfig
from model_defs.sharding import KV_PAGES_SPEC
from pallas_kernels.page_copies import PackedTile, packed_tile
from pallas_kernels.ragged_paged_attention import page_dtype, page_shape
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.runtime.errors import step_failed

_NUM_DUMMY_PAGES = 1


class KVStorage:
    """Shape and placement of a model's pools, and the factory of new pools.

    Attributes:
      shape: (num_pages, rows, 2 * num_kv_heads, head_dim) of every pool, including the dummy page; the rows
        of a page are its tokens and, with a `kv_dtype`, the rows that hold their scales.
      dtype: dtype of the pools: the model's, or bytes.
      kv_dtype: storage format of pages; None is the model's dtype.
      packing: packing of chunks outside the pools; None means that they have the format of pages.
      page_size: tokens per page.
      sharding: sharding of pools, and of chunks on the device: by KV head over the mesh axis "tp".
      host_sharding: the same split in pinned host memory.
      groups: the layers of every group, in order.
      chunk_dtype: dtype of chunks outside the pools: the pools', or bytes.
    """

    def __init__(
        self, model: ModelConfig, cache: CacheConfig, dtype: jnp.dtype, mesh: Mesh, num_layer_groups: int = 1
    ) -> None:
        """Compile the program that makes empty pools, so that a reset compiles nothing.

        Args:
          model: the model configuration, for layers and KV heads.
          cache: the cache configuration, for number and size of pages.
          dtype: dtype of the model.
          mesh: mesh with one axis, "tp".
          num_layer_groups: number of groups; values above the number of layers are reduced to it.

        Raises:
          ConfigError: a token's slot in the pool would exceed 32 bits, or `check_addresses` or `host_packing`
            refuses the configuration.
        """
        max_num_pages = np.iinfo(np.int32).max // cache.chunk_tokens - _NUM_DUMMY_PAGES
        if cache.num_gpu_pages > max_num_pages:
            limit = (
                f"at most {max_num_pages}, since slots ({cache.chunk_tokens} a page) are numbered in 32 bits"
            )
            raise ConfigError("cache.gpu_pages", cache.num_gpu_pages, limit)
        check_addresses(model, cache, mesh.devices.size)
        self.num_layers = model.num_layers
        self.num_pages = cache.num_gpu_pages + _NUM_DUMMY_PAGES
        self.kv_dtype, self.page_size = cache.kv_dtype, cache.chunk_tokens
        page = page_shape(cache.kv_dtype, cache.chunk_tokens, model.num_kv_heads, model.head_dim)
        self.shape = (self.num_pages, *page)
        self.dtype = page_dtype(cache.kv_dtype, dtype)
        self.packing = host_packing(model, cache, dtype)
        self.chunk_dtype = self.dtype if self.packing is None else jnp.dtype(jnp.uint8)
        self.sharding = NamedSharding(mesh, PartitionSpec(*KV_PAGES_SPEC))
        self.host_sharding = self.sharding.with_memory_kind("pinned_host")
        self.groups = layer_groups(model.kinds, num_layer_groups)
        self._make = _make_pools.lower(self.num_layers, self.shape, self.dtype, self.sharding).compile()

    @property
    def page_bytes(self) -> int:
        """Bytes per device of one page, over all layers."""
        shard = self.sharding.shard_shape(self.shape)
        return self.num_layers * int(np.prod(shard[1:])) * self.dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes per device of all pools, the dummy page included."""
        return self.num_pages * self.page_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes per device of one chunk outside the pools, which is what a chunk in transit takes."""
        return self.slot_bytes // self.sharding.mesh.devices.size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one chunk outside the pools, over all layers and devices: the size of a host slot."""
        shapes = [self.chunk_shape(group) for group in range(len(self.groups))]
        return sum(map(math.prod, shapes)) * self.chunk_dtype.itemsize

    def chunk_shape(self, group: int) -> tuple[int, ...]:
        """Return (layers of the group, rows of a page or packed page, 2 * num_kv_heads, head_dim)."""
        num_rows = self.shape[1] if self.packing is None else self.packing.num_rows
        return (len(self.groups[group]), num_rows, *self.shape[2:])

    @property
    def padding_slot(self) -> int:
        """The write slot of a padding token: just past the pool, so that its write is dropped."""
        return self.num_pages * self.page_size

    def new_pools(self) -> list[jax.Array]:
        """Return pools of zeros, one per layer, made on the device."""
        return self._make()


class DevicePools:
    """The pools, by group of layers.

    Attributes:
      groups: the pools of every group's layers, as the last dispatched program leaves them.
    """

    def __init__(self, storage: KVStorage) -> None:
        """Hold nothing before the first `reset`."""
        self._storage = storage
        self.groups: list[list[jax.Array]] = []

    def reset(self) -> None:
        """Allocate new, empty pools. The old pool arrays are deleted, even if other code refers to them.

        Raises:
          StepFailedError: the device has no memory for them.
        """
        # Delete the old pools first, since two sets may not fit. Dropping the references is not enough: the
        # traceback of the failed step or Ctrl-C being handled has frames that refer to them. Donated arrays
        # are deleted already, and memory used by work in flight is freed when that work ends.
        try:
            self.clear()
            self.replace(self._storage.new_pools())  # store them before waiting: an interrupt may come
            jax.block_until_ready(self.groups)
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("new pools could not be made on the device", error) from error

    def clear(self) -> None:
        """Delete the pools and hold nothing, until the next `reset`."""
        for pool in self.by_layer:
            pool.delete()
        self.groups = []

    def replace(self, pools: Sequence[jax.Array]) -> None:
        """Use `pools`, one per layer, from now on."""
        self.groups = [[pools[layer] for layer in layers] for layers in self._storage.groups]

    @property
    def by_layer(self) -> list[jax.Array]:
        """All pools, one per layer."""
        return [pool for group in self.groups for pool in group]


def num_layer_groups_on(num_devices: int, given: int | None) -> int:
    """Return `runner.num_layer_groups`, or the default for `num_devices` devices where it is None.

    For every piece of a chunk, the host creates, starts and ends one array per device. So pieces cost more
    host time with more devices, while the copy time that groups hide is divided among the devices.
    """
    if given is not None:
        return given
    return 2 if num_devices == 1 else 1


def layer_groups(kinds: Sequence[LayerKind], num_groups: int) -> tuple[range, ...]:
    """Return `num_groups` runs of consecutive layers, or one per layer if there are fewer layers.

    Sizes are as equal as possible, and none is less than the first group's, whose copy nothing hides. If the
    layers are whole periods of the kinds' pattern, with one for each group, groups are whole periods, too.
    Then groups of equal size share a program.
    """
    num_layers = len(kinds)
    num_groups = min(num_groups, num_layers)
    period = _period(kinds)
    if num_layers % period or num_layers // period < num_groups:
        period = 1
    starts = [num_layers // period * i // num_groups * period for i in range(num_groups)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise([*starts, num_layers]))


def _period(kinds: Sequence[LayerKind]) -> int:
    """Return the number of layers after which the pattern of kinds begins again."""
    return next(size for size in range(1, len(kinds) + 1) if kinds[size:] == kinds[: len(kinds) - size])


def chunk_bytes(model: ModelConfig, chunk_tokens: int, dtype: jnp.dtype, kv_dtype: str | None = None) -> int:
    """Return the bytes of a chunk's pages over all layers and devices, before any pool is made."""
    per_layer = math.prod(page_shape(kv_dtype, chunk_tokens, model.num_kv_heads, model.head_dim))
    return model.num_layers * per_layer * page_dtype(kv_dtype, dtype).itemsize


def slot_bytes(model: ModelConfig, cache: CacheConfig, dtype: jnp.dtype) -> int:
    """Return the bytes of a host slot over all layers and devices; raise ConfigError as `host_packing`."""
    packing = host_packing(model, cache, dtype)
    if packing is None:
        return chunk_bytes(model, cache.chunk_tokens, dtype, cache.kv_dtype)
    return model.num_layers * packing.num_rows * 2 * model.num_kv_heads * model.head_dim


def host_packing(model: ModelConfig, cache: CacheConfig, dtype: jnp.dtype) -> PackedTile | None:
    """Return how chunks are packed outside the pools; None if they are not.

    Raises:
      ConfigError: `cache.pack_host` is True, but this model's KV state has no packed form.
    """
    limit = _packing_limit(model, cache, dtype)
    if limit is None:
        return packed_tile(cache.chunk_tokens, model.head_dim) if cache.pack_host is not False else None
    if cache.pack_host:
        raise ConfigError("cache.pack_host", True, "None or False for this model", limit)
    return None


def packing_reason(model: ModelConfig, cache: CacheConfig, dtype: jnp.dtype) -> str:
    """Return, as text, why chunks are or are not packed outside the pools."""
    limit = _packing_limit(model, cache, dtype)
    if limit is not None:
        return f"off: {limit}"
    if cache.pack_host is False:
        return "off: cache.pack_host is False"
    tile = packed_tile(cache.chunk_tokens, model.head_dim)
    assert tile is not None
    return f"on: {tile.share:.1%} of the bytes of bfloat16, lossless"


def _packing_limit(model: ModelConfig, cache: CacheConfig, dtype: jnp.dtype) -> str | None:
    """Return why the KV state has no packed form, or None if it has one."""
    if cache.kv_dtype is not None:
        return f"{cache.kv_dtype} is not packed, only bfloat16 is"
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name} is not packed, only bfloat16 is"
    if packed_tile(cache.chunk_tokens, model.head_dim) is None:
        return f"a head of {model.head_dim} elements is odd, or too small to save bytes"
    return None


def check_addresses(model: ModelConfig, cache: CacheConfig, num_devices: int) -> None:
    """Refuse byte pools that kernels cannot address: from 2 GiB to 4 GiB per layer and device.

    Pallas' Triton back end uses 64-bit offsets for arrays of more than 2**32 bytes. For others it uses signed
    32-bit offsets, which count elements. These suffice for elements of two bytes, but address only 2 GiB of
    one-byte elements.

    Raises:
      ConfigError: `cache.gpu_pages` is in that range.
    """
    most = most_byte_pages(model, cache, num_devices)
    if cache.num_gpu_pages > most:
        limit = f"at most {most:,} (2 GiB per layer), or over twice as many, with {cache.kv_dtype} state"
        raise ConfigError(
            "cache.gpu_pages", cache.num_gpu_pages, limit, "or raise runner.tensor_parallel_size"
        )


def most_byte_pages(model: ModelConfig, cache: CacheConfig, num_devices: int) -> int:
    """Return `cache.gpu_pages`, reduced to what kernels can address; see `check_addresses`."""
    if cache.kv_dtype is None:
        return cache.num_gpu_pages
    page = page_shape(cache.kv_dtype, cache.chunk_tokens, model.num_kv_heads // num_devices, model.head_dim)
    page_bytes = math.prod(page)
    pool_bytes = (cache.num_gpu_pages + _NUM_DUMMY_PAGES) * page_bytes
    if pool_bytes < 2**31 or pool_bytes > 2**32:
        return cache.num_gpu_pages
    return (2**31 - 1) // page_bytes - _NUM_DUMMY_PAGES


def read_page(pools: Sequence[jax.Array], page: int) -> np.ndarray:
    """Return one page as [num_layers, rows of a page, 2 * num_kv_heads, head_dim] on the host, for tests."""
    return np.stack([np.asarray(pool[page]) for pool in pools])


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _make_pools(
    num_layers: int, shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding
) -> list[jax.Array]:
    pools = [jnp.zeros(shape, dtype) for _ in range(num_layers)]
    return [jax.lax.with_sharding_constraint(pool, sharding) for pool in pools]
