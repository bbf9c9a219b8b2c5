"""How much host memory jaxlib may pin for GPUs.

Owns: raising that limit, which has to be done before JAX has a client for GPUs.
Does not know: what it is pinned for, or how much of it the machine has.
Called by: whoever assembles an engine that keeps state there.
"""

from __future__ import annotations

import os
from typing import Final

from pensieve_jax.runtime.jax_clients import has_clients

VARIABLE: Final = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Of jaxlib: so many times 2**30 bytes."""

OWN_LIMIT_GB: Final = 64
"""Of jaxlib 0.11.2, where the variable is not set."""


def allow_pinning(num_bytes: int) -> None:
    """Let so much be pinned and a fifth more, unless the environment says how much.

    Regions of jaxlib's allocator do not fill up to the last byte, and copies of weights pass through it.
    Where JAX has been used before it is too late, and nothing is set.
    """
    limit_gb = -(-num_bytes * 6 // 5 // 2**30)
    if limit_gb > OWN_LIMIT_GB and VARIABLE not in os.environ and not has_clients():
        os.environ[VARIABLE] = str(limit_gb)
