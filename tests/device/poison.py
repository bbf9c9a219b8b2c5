"""Pools in which every page holds NaN until it is written."""

from __future__ import annotations

import jax
import numpy as np

from pensieve_jax.device.kv_storage import KVStorage


def poisoned_pools(storage: KVStorage) -> list[jax.Array]:
    """Return one pool per layer, not shared with each other; for 8-bit pages all scales are NaN."""
    value = np.nan if storage.kv_dtype is None else -1
    filled = np.full(storage.shape, value, storage.dtype)
    return [jax.device_put(filled, storage.sharding, may_alias=False) for _ in range(storage.num_layers)]
