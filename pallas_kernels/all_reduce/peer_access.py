"""Query of the CUDA driver: do the GPUs of this process access each other's memory?

Owns: the calls of the CUDA driver. Does not know: what is written to a peer. Called by: `api.devices_limit`.
JAX enables peer access wherever the driver reports it as possible, but has no API that reports it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from typing import Any

_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_SUCCESS = 0


def peer_access_limit(ordinals: Iterable[int]) -> str | None:
    """Return why the GPUs with these visible ordinals cannot exchange through memory; None if they can."""
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
    """Return what the driver call writes to its first argument; None if it fails."""
    value = ctypes.c_int()
    return value.value if ask(ctypes.byref(value), *arguments) == _SUCCESS else None
