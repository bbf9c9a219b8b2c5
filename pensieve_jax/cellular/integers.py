"""Integers of 32 bits, as people give them.

Owns: what passes for one, and for several.
Does not know: what they mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

INT32 = np.dtype(np.int32)


def is_int32(value: Any) -> bool:
    """Python's or numpy's; no truth value, and no fraction."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and -(2**31) <= value < 2**31


def is_sized(values: Any) -> bool:
    """Whether it has a length; an array of no dimensions has a method for it, but none."""
    return isinstance(values, Sized) and getattr(values, "ndim", 1) > 0


def int32s(values: Sequence[int] | np.ndarray) -> np.ndarray | None:
    """i32[n], a copy, since an array may be used again; None if they are anything else, or too large."""
    if isinstance(values, str | bytes | bytearray | memoryview):  # which `array` takes for numbers in memory
        return None
    if type(values) is not np.ndarray and hasattr(values, "__array__"):
        values = np.asarray(values)
    if type(values) is not np.ndarray:
        if not isinstance(values, Sequence):  # a set has no order
            return None
        try:
            return np.frombuffer(array("i", values), INT32)
        except (OverflowError, TypeError):
            return None
    if values.ndim != 1 or values.dtype.kind not in "iu":
        return None
    narrow = values.astype(INT32)
    return narrow if values.dtype == INT32 or (narrow == values).all() else None
