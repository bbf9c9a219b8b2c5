"""How much host memory jaxlib may pin for GPUs.

Owns: raising that limit, which has to be done before JAX has a client for GPUs.
Does not know: what it is pinned for.
"""

from __future__ import annotations

import os
from typing import Final

from pensieve_jax.runtime.jax_clients import has_clients

VARIABLE: Final = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Of jaxlib: so many times 2**30 bytes."""

OWN_LIMIT_GB: Final = 64
"""Of jaxlib 0.11.2, where the variable is not set."""

_set_here: set[str] = set()
"""Limits that the environment has from here, and not from whoever started the process."""


def allow_pinning(num_bytes: int, available: int | None) -> None:
    """Let so much be pinned and a fifth more, unless the environment says how much.

    Regions of jaxlib's allocator do not fill up to the last byte, and copies of weights pass through it. It
    takes regions twice as large as those before while the limit lets it, so that all of the limit may be
    pinned in the end. Where JAX has been used before it is too late, and nothing is set.

    Args:
      num_bytes: of what will be kept.
      available: bytes that the machine has for this; the fifth is what fits into 95% of them. None: unknown.
    """
    most = num_bytes * 6 // 5
    if available is not None:
        most = max(min(most, available * 19 // 20), num_bytes)
    limit_gb = -(-most // 2**30)
    now = os.environ.get(VARIABLE)
    is_others = now is not None and now not in _set_here
    if is_others or limit_gb <= int(now or OWN_LIMIT_GB) or has_clients():
        return
    os.environ[VARIABLE] = str(limit_gb)
    _set_here.add(os.environ[VARIABLE])
