"""That jaxlib launches a program's kernels from a thread of its own, and not from the one that calls it.

Owns: asking for it, which has to be done before JAX has a client for GPUs; and whether JAX has clients, after
which what it reads once is read no more.
Does not know: what is launched.

A step of 40 layers is 540 kernels. To launch them takes the thread that schedules 2 to 6 ms, and 9 where
chunks are copied meanwhile, in which nothing else is done. XLA can
hand executions and copies to one thread for each device instead, which starts them in the order of the calls.
In jaxlib 0.11.2 that is an option whose variable is still named after a client that is gone.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
"""Of jaxlib: "1" for launches from its own thread, "0", its default, for launches from the caller's."""
_log = logging.getLogger(__name__)
_BRIDGE = "jax._src.xla_bridge"


def ask_for_asynchronous_launches() -> None:
    """Set `VARIABLE`, unless the environment has it. Where JAX has a GPU client already, warn instead."""
    if VARIABLE in os.environ:
        return
    if not has_clients():
        os.environ[VARIABLE] = "1"
        return
    import jax  # it has been, by whoever used it

    if jax.default_backend() == "gpu":
        _log.warning(
            "JAX was used before pensieve_jax was imported: a step's kernels are launched by the thread that "
            "schedules. Import pensieve_jax first, or set %s=1.",
            VARIABLE,
        )


def has_clients() -> bool:
    """Whether JAX has clients of devices in this process. It publishes no way to ask: unknown is no."""
    ask = getattr(sys.modules.get(_BRIDGE), "backends_are_initialized", None)
    return ask is not None and bool(ask())
