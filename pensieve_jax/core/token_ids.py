"""Comparison of lists of token ids.

Owns: how far two lists are equal.
Does not know: what the ids mean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def num_equal(ones: ArrayLike, others: ArrayLike) -> int:
    """Return the length of the common beginning of two lists of token ids."""
    first, second = np.asarray(ones, np.int64), np.asarray(others, np.int64)
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
