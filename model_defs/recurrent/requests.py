"""Checks of requests to recurrent models.

Owns: the checks of token ids and counts.
Does not know: how models use them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from model_defs.recurrent.errors import RequestError

MAX_STEPS = 2**24
"""Most steps of one request, far above engines' limits. Engines check theirs only after allocating arrays."""


def check_requests(kind: type, *requests: object) -> None:
    """Raise RequestError for the first request that is not a `kind`."""
    for place, request in enumerate(requests):
        if not isinstance(request, kind):
            field = "request" if len(requests) == 1 else f"requests[{place}]"
            raise RequestError(field, request, f"a {kind.__name__} from the model's request()")


def as_array(field: str, values: Any, limit: str) -> np.ndarray:
    """Convert `values` to an array of their own type.

    Raises:
      RequestError: nested lists have different lengths.
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise RequestError(field, values, limit) from error


def check_ids(field: str, ids: Any, vocab_size: int) -> np.ndarray:
    """Return token ids as i32[n].

    Raises:
      RequestError: there are no ids, they are not ints, or one is not in the vocabulary.
    """
    limit = "at least one token id"
    found = as_array(field, ids, limit)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise RequestError(field, ids, limit)
    if found.min() < 0 or found.max() >= vocab_size:
        place = int(np.argmax((found < 0) | (found >= vocab_size)))
        raise RequestError(f"{field}[{place}]", int(found[place]), f"an id from 0 to {vocab_size - 1}")
    return found.astype(np.int32)


def check_id(field: str, value: Any, vocab_size: int) -> int:
    """Return a token id as int.

    Raises:
      RequestError: it is not an int, or not in the vocabulary.
    """
    if not _is_int(value) or not 0 <= value < vocab_size:
        raise RequestError(field, value, f"an id from 0 to {vocab_size - 1}")
    return int(value)


def check_count(field: str, value: Any, least: int) -> int:
    """Return a number of steps as int.

    Raises:
      RequestError: it is not an int, less than `least`, or more than `MAX_STEPS`.
    """
    if not _is_int(value) or value < least:
        raise RequestError(field, value, f"an int of at least {least}")
    if value > MAX_STEPS:
        raise RequestError(field, value, f"at most {MAX_STEPS}")
    return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
