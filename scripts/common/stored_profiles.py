"""A device's profile for KV state that is stored in fewer bytes than it was measured with.

Owns: how many bytes a token then takes.
Does not know: flags, or what is simulated. Called by: simulate, validate_simulator.
"""

from __future__ import annotations

import jax.numpy as jnp

from model_defs import preset
from pensieve_jax.device.kv_storage import chunk_bytes
from pensieve_jax.simulator import DeviceProfile


def stored_profile(
    profile: DeviceProfile, kv_dtype: str | None, chunk_tokens: int, *, read_rate: float = 1.0
) -> DeviceProfile:
    """The profile of a preset's model with KV state as `kv_dtype` says; None: as it was measured.

    Args:
      profile: of a model that is a preset.
      kv_dtype: as of `CacheConfig`.
      chunk_tokens: tokens of a page.
      read_rate: bytes of it that steps read in a second, over the profile's.
    """
    if kv_dtype is None:
        return profile
    page_bytes = chunk_bytes(preset(profile.model), chunk_tokens, jnp.dtype(profile.dtype), kv_dtype)
    return profile.keeping(page_bytes // chunk_tokens, rate=read_rate)
