"""The device memory for the KV cache that a system of the serving benchmark was given, in bytes.

Owns: the conversion of a system's description, or else of the flags, into comparable bytes.
Does not know: how a system spends them, or host memory, which only some systems use.
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
    """Return the bytes on all devices together, or None if only the system knows.

    Args:
      described: result of the system's `describe`.
      model: model of the KV cache.
      dtype: value of `--dtype`.
      cache: cache settings of the flags, whose pages a system without our configuration gets.
      is_ours: whether 8-bit pages include scales, as ours do; other systems' pages hold the numbers alone.
    """
    config = described.get("config")
    if config is not None and "kv_bytes" in config:
        return int(config["kv_bytes"] * config["tensor_parallel_size"])
    if config is not None:
        cache = CacheConfig(**config["cache"])
    elif cache.gpu_pages is None:
        return None
    own = resolve_dtype(dtype, model)
    page = chunk_bytes(model, cache.chunk_tokens, own, cache.kv_dtype if is_ours else None)
    if cache.kv_dtype is not None and not is_ours:
        page //= own.itemsize  # 8 bits a number
    return cache.num_gpu_pages * page
