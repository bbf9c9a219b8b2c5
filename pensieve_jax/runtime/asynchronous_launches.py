"""Asynchronous launches: jaxlib launches a program's kernels from a thread of its own, not the caller's.

Owns: the request for it, which must be made before JAX has a client for GPUs; and the check whether JAX has
clients, after which settings that JAX reads once no longer have an effect.
Does not know: what is launched.

A step of 40 layers is 540 kernels. Launching them occupies the scheduling thread for 2 to 6 ms, or 9 ms while
chunks are copied. XLA can hand executions and copies to one thread per device instead, which starts them in
call order. In jaxlib 0.11.2 the variable of this option is still named after a client that no longer exists.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
"""A variable of jaxlib: "1" launches from its own thread, "0" (the default) from the caller's."""
_log = logging.getLogger(__name__)
_BRIDGE = "jax._src.xla_bridge"


def ask_for_asynchronous_launches() -> None:
    """Set `VARIABLE` unless the environment has it. If JAX already has a GPU client, warn instead."""
    if VARIABLE in os.environ:
        return
    if not has_clients():
        os.environ[VARIABLE] = "1"
        return
    import jax  # already imported, since it has clients

    if jax.default_backend() == "gpu":
        _log.warning(
            "JAX was used before pensieve_jax was imported, so the scheduling thread launches a step's "
            "kernels. Import pensieve_jax first, or set %s=1.",
            VARIABLE,
        )


def has_clients() -> bool:
    """Return whether JAX has device clients in this process; False if unknown, as no public API tells."""
    ask = getattr(sys.modules.get(_BRIDGE), "backends_are_initialized", None)
    return ask is not None and bool(ask())
