"""Copies of JSON values that callers give.

Owns: the copy, and its errors.
Does not know: what the values mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pensieve_jax.core.errors import InvalidRequestError


def json_copy(value: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a copy through JSON, so that later changes by the caller have no effect.

    Raises InvalidRequestError naming `field` for what JSON or UTF-8 cannot hold.
    """
    try:
        text = json.dumps(dict(value), allow_nan=False, ensure_ascii=False)
        text.encode()
        copied: dict[str, Any] = json.loads(text)
    except UnicodeEncodeError as error:
        limit = "text that UTF-8 can hold, without lone surrogates"
        raise InvalidRequestError(field, value, limit) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, value, f"made of JSON values ({error})") from error
    return copied
