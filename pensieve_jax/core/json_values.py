"""Copies of JSON values that callers give.

Owns: the copy, and its errors.
Does not know: what the values mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.options import is_utf8

MAX_VALUES: Final = 250_000
"""Limit of values of a copy. The encoder holds the interpreter's lock for up to 0.2 us a value."""
_FEW_STRINGS: Final = 16
_UTF8: Final = "text that UTF-8 can hold, without lone surrogates"


def json_copy(value: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a copy through JSON, so that later changes by the caller have no effect.

    Raises InvalidRequestError naming `field` for what JSON or UTF-8 cannot hold, and for too many values.
    """
    if len(value) <= _FEW_STRINGS and all(
        [type(name) is str and type(one) is str for name, one in value.items()]
    ):
        # Most values are messages of a role and a text, whose strings need no copy. JSON takes six times as
        # long.
        for text in (*value.keys(), *value.values()):
            if not is_utf8(text):
                raise InvalidRequestError(field, value, _UTF8)
        return dict(value)
    if _has_more_values(value, MAX_VALUES):
        raise InvalidRequestError(field, f"over {MAX_VALUES:,} values", f"at most {MAX_VALUES:,} JSON values")
    try:
        text = json.dumps(dict(value), allow_nan=False, ensure_ascii=False)
        text.encode()
        copied: dict[str, Any] = json.loads(text)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, value, _UTF8) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, value, f"made of JSON values ({error})") from error
    return copied


def _has_more_values(value: Any, limit: int) -> bool:
    """Return whether a JSON value has more than `limit` values in it, names included."""
    waiting, number = [value], 0
    while waiting and number <= limit:
        one = waiting.pop()
        if isinstance(one, Mapping):
            number += 2 * len(one)
            waiting += (inner for inner in one.values() if isinstance(inner, Mapping | list | tuple))
        else:
            number += len(one)
            waiting += (inner for inner in one if isinstance(inner, Mapping | list | tuple))
    return number > limit
