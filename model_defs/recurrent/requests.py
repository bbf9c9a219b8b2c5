"""What every request of these models is checked for.

Owns: the checks of token ids and counts.
Does not know: what becomes of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from model_defs.recurrent.errors import RequestError

MAX_STEPS = 2**24
"""Of one request: far more than engines take, which say so when arrays of as many numbers have been made."""


def check_requests(kind: type, *requests: object) -> None:
    """Raise RequestError for the first that no model of this kind made."""
    for place, request in enumerate(requests):
        if not isinstance(request, kind):
            field = "request" if len(requests) == 1 else f"requests[{place}]"
            raise RequestError(field, request, f"a {kind.__name__}, as the model's own request() makes it")


def as_array(field: str, values: Any, limit: str) -> np.ndarray:
    """Of whatever `values` are of.

    Raises:
      RequestError: lists in them are of different lengths.
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise RequestError(field, values, limit) from error


def check_ids(field: str, ids: Any, vocab_size: int) -> np.ndarray:
    """i32[n] of token ids, one at least.

    Raises:
      RequestError: they are none, no ints, or one is not in the vocabulary.
    """
    limit = "token ids, one at least"
    found = as_array(field, ids, limit)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise RequestError(field, ids, limit)
    if found.min() < 0 or found.max() >= vocab_size:
        place = int(np.argmax((found < 0) | (found >= vocab_size)))
        raise RequestError(f"{field}[{place}]", int(found[place]), f"an id from 0 to {vocab_size - 1}")
    return found.astype(np.int32)


def check_id(field: str, value: Any, vocab_size: int) -> int:
    """One token's id.

    Raises:
      RequestError: it is no int, or not in the vocabulary.
    """
    if not _is_int(value) or not 0 <= value < vocab_size:
        raise RequestError(field, value, f"an id from 0 to {vocab_size - 1}")
    return int(value)


def check_count(field: str, value: Any, least: int) -> int:
    """A number of steps.

    Raises:
      RequestError: it is no int, less than `least`, or more than `MAX_STEPS`.
    """
    if not _is_int(value) or value < least:
        raise RequestError(field, value, f"an int of at least {least}")
    if value > MAX_STEPS:
        raise RequestError(field, value, f"at most {MAX_STEPS}")
    return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
