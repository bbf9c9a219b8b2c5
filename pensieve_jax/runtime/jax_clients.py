"""Whether JAX has been used in this process, after which what it reads once is read no more.

Owns: the question.
Does not know: what it is asked for.
"""

from __future__ import annotations

import sys

_BRIDGE = "jax._src.xla_bridge"


def has_clients() -> bool:
    """Whether JAX has clients of devices in this process. It publishes no way to ask: unknown is no."""
    ask = getattr(sys.modules.get(_BRIDGE), "backends_are_initialized", None)
    return ask is not None and bool(ask())
