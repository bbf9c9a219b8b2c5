"""The device's pages: one pool of KV state per layer.

Owns: the shape, dtype and placement of the pools, and how new ones are made.
Does not know: which page holds what (the cache manager does), or how attention reads one.
Called by: `model_runner`; tests read single pages.

Pools are separate arrays, one per layer, because each is updated in place by its layer's KV write; a page
has the same index in all of them. Page 0 is a dummy on top of the pages that the cache manages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from model_defs.sharding import KV_PAGES_SPEC
from pensieve_jax.config import CacheConfig
from pensieve_jax.core.errors import ConfigError

_NUM_DUMMY_PAGES = 1


class KVStorage:
    """Shape and placement of a model's pools, and the factory of new ones.

    Attributes:
      shape: (num_pages, page_size, 2 * num_kv_heads, head_dim) of every pool, the dummy page included.
      dtype: of the pools; the model's.
      sharding: split by KV head over the mesh axis "tp".
    """

    def __init__(self, model: ModelConfig, cache: CacheConfig, dtype: jnp.dtype, mesh: Mesh) -> None:
        """Compile the making of empty pools, so that a reset compiles nothing.

        Raises:
          ConfigError: a token's slot in the pool would exceed 32 bits.
        """
        max_num_pages = np.iinfo(np.int32).max // cache.chunk_tokens - _NUM_DUMMY_PAGES
        if cache.gpu_pages > max_num_pages:
            limit = (
                f"at most {max_num_pages}, since slots of {cache.chunk_tokens} a page are numbered in 32 bits"
            )
            raise ConfigError("cache.gpu_pages", cache.gpu_pages, limit)
        self.num_layers = model.num_layers
        self.num_pages = cache.gpu_pages + _NUM_DUMMY_PAGES
        self.shape = (self.num_pages, cache.chunk_tokens, 2 * model.num_kv_heads, model.head_dim)
        self.dtype = dtype
        self.sharding = NamedSharding(mesh, PartitionSpec(*KV_PAGES_SPEC))
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
    def padding_slot(self) -> int:
        """The write slot of a padded token: just past the pool, so that its write is dropped."""
        return self.num_pages * self.shape[1]

    def new_pools(self) -> list[jax.Array]:
        """Pools of zeros, one per layer, made on the device."""
        return self._make()


def read_page(pools: Sequence[jax.Array], page: int) -> np.ndarray:
    """[num_layers, page_size, 2 * num_kv_heads, head_dim]: the host's view of one page, for tests."""
    return np.stack([np.asarray(pool[page]) for pool in pools])


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _make_pools(
    num_layers: int, shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding
) -> list[jax.Array]:
    pools = [jnp.zeros(shape, dtype) for _ in range(num_layers)]
    return [jax.lax.with_sharding_constraint(pool, sharding) for pool in pools]
