"""A device's profile for KV state that is stored in fewer bytes than it was measured with.

Owns: how many bytes a token then takes, on the device and in host memory.
Does not know: flags, or what is simulated.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from model_defs import PRESETS, preset
from pensieve_jax import CacheConfig, ConfigError
from pensieve_jax.device.kv_storage import chunk_bytes, host_packing
from pensieve_lab.simulator import DeviceProfile


def stored_profile(profile: DeviceProfile, cache: CacheConfig, *, read_rate: float = 1.0) -> DeviceProfile:
    """The profile of a model with KV state as the cache's configuration says.

    Args:
      profile: as it was measured: in its dtype, and nothing packed.
      cache: its `kv_dtype`, `chunk_tokens` and `pack_host` count. The first needs a preset's model; what is
        no preset is not packed.
      read_rate: with a `kv_dtype`, bytes of it that steps read in a second, over the profile's.

    Raises:
      ConfigError: names `cache.pack_host`, which asks for what there is no form of.
    """
    if profile.model not in PRESETS:
        if cache.pack_host:
            raise ConfigError("cache.pack_host", True, f"left out for {profile.model!r}, which is no preset")
        return profile
    model, dtype = preset(profile.model), jnp.dtype(profile.dtype)
    packing = host_packing(model, cache, dtype)
    if packing is not None:
        return dataclasses.replace(profile, host_share=packing.share)
    if cache.kv_dtype is None:
        return profile
    page_bytes = chunk_bytes(model, cache.chunk_tokens, dtype, cache.kv_dtype)
    return profile.keeping(page_bytes // cache.chunk_tokens, rate=read_rate)
