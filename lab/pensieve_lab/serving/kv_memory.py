"""How many bytes of KV state in device memory a system of the serving benchmark was given.

Owns: the way from what a system tells of itself, or else from the flags, to bytes that can be compared.
Does not know: how a system spends them, or host memory, which some systems have and others do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_defs import ModelConfig
from model_defs.registry import resolve_dtype
from pensieve_jax import CacheConfig
from pensieve_jax.device.kv_storage import chunk_bytes


def kv_bytes(
    described: Mapping[str, Any], model: ModelConfig, dtype: str, cache: CacheConfig, *, is_ours: bool
) -> int | None:
    """All devices together; None where only the system knows.

    Args:
      described: what the system's `describe` gave.
      model: whose KV state it is.
      dtype: as of `--dtype`.
      cache: of the flags, whose pages a system without a configuration of ours gets.
      is_ours: its pages in 8 bits hold scales as well; others' hold the numbers alone.
    """
    config = described.get("config")
    if config is not None and "kv_bytes" in config:
        return int(config["kv_bytes"] * config["tensor_parallel_size"])
    if config is not None:
        cache = CacheConfig(**config["cache"])
    elif cache.gpu_memory_fraction is not None:
        return None
    own = resolve_dtype(dtype, model)
    page = chunk_bytes(model, cache.chunk_tokens, own, cache.kv_dtype if is_ours else None)
    if cache.kv_dtype is not None and not is_ours:
        page //= own.itemsize  # 8 bits a number
    return cache.gpu_pages * page
