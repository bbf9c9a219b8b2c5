"""A device's profile for a KV cache stored in fewer bytes than it was measured with.

Owns: the bytes per token on the device and in host memory.
Does not know: flags, or what is simulated.
Called by programs.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from model_defs import PRESETS, preset
from pensieve_jax import CacheConfig, ConfigError
from pensieve_jax.device.kv_storage import chunk_bytes, host_packing
from pensieve_lab.simulator import DeviceProfile


def stored_profile(profile: DeviceProfile, cache: CacheConfig, *, read_rate: float = 1.0) -> DeviceProfile:
    """Return the profile of a model whose KV cache is stored as the configuration says.

    Args:
      profile: as measured, in its dtype and without packing.
      cache: its `kv_dtype`, `chunk_tokens` and `pack_host` are used. `kv_dtype` needs a preset's model; a
        model that is not a preset is not packed.
      read_rate: with a `kv_dtype`, the rate at which steps read its bytes, relative to the profile's.

    Raises:
      ConfigError: names `cache.pack_host`, if the model has no packed form.
    """
    if profile.model not in PRESETS:
        if cache.pack_host:
            raise ConfigError("cache.pack_host", True, f"left out for {profile.model!r}, not a preset")
        return profile
    model, dtype = preset(profile.model), jnp.dtype(profile.dtype)
    packing = host_packing(model, cache, dtype)
    if packing is not None:
        return dataclasses.replace(profile, host_share=packing.share)
    if cache.kv_dtype is None:
        return profile
    page_bytes = chunk_bytes(model, cache.chunk_tokens, dtype, cache.kv_dtype)
    return profile.keeping(page_bytes // cache.chunk_tokens, rate=read_rate)
