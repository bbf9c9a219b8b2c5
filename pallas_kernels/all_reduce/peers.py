"""Whether GPUs of this process reach each other's memory, as the driver says.

Owns: the questions to the CUDA driver. Does not know: what would be written there.
JAX makes peers' memory accessible where this says that it can be, and tells nobody.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from typing import Any

_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_SUCCESS = 0


def peers_limit(ordinals: Iterable[int]) -> str | None:
    """Why GPUs with these numbers among the visible ones do not exchange by memory; None: they do."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver cannot be asked which GPUs reach each other: {error}"
    if driver.cuInit(0) != _SUCCESS:
        return "the CUDA driver does not say which GPUs reach each other"
    for one, other in itertools.permutations(ordinals, 2):
        handles = [_answer(driver.cuDeviceGet, ordinal) for ordinal in (one, other)]
        reaches = None not in handles and _answer(driver.cuDeviceCanAccessPeer, *handles)
        if not reaches:
            return f"GPU {one} does not reach the memory of GPU {other}"
        if not _answer(driver.cuDeviceGetP2PAttribute, _ATOMICS, *handles):
            return f"GPU {one} has no atomic operations on the memory of GPU {other}"
    return None


def _answer(ask: Any, *arguments: Any) -> int | None:
    """What the driver writes to its first argument; None: it refuses."""
    value = ctypes.c_int()
    return value.value if ask(ctypes.byref(value), *arguments) == _SUCCESS else None
