"""Pools in which every page holds NaN until somebody writes it."""

from __future__ import annotations

import jax
import numpy as np

from pensieve_jax.device.kv_storage import KVStorage


def poisoned_pools(storage: KVStorage) -> list[jax.Array]:
    """One pool a layer, not shared with each other; of pages in 8 bits all scales are NaN."""
    value = np.nan if storage.kv_dtype is None else -1
    filled = np.full(storage.shape, value, storage.dtype)
    return [jax.device_put(filled, storage.sharding, may_alias=False) for _ in range(storage.num_layers)]
