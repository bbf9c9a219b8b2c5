"""Checks of 32-bit integers in user input.

Owns: the accepted types of one integer, and of several.
Does not know: what the integers mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

INT32 = np.dtype(np.int32)


def is_int32(value: Any) -> bool:
    """Return whether `value` is a Python or numpy integer of 32 bits; booleans and floats are not."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and -(2**31) <= value < 2**31


def is_sized(values: Any) -> bool:
    """Return whether `values` has a length. A 0-dimensional array has `__len__`, but it raises."""
    return isinstance(values, Sized) and getattr(values, "ndim", 1) > 0


def int32s(values: Sequence[int] | np.ndarray) -> np.ndarray | None:
    """Return a copy as i32[n]; None for other types or larger values. A copy, since callers reuse arrays."""
    if isinstance(values, str | bytes | bytearray | memoryview):  # `array` would read these as raw memory
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
