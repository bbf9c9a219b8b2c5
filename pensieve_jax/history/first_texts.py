"""The first user text of a request, read from only the first bytes of its items, since these may be long.

Owns: the number of bytes that are read, and the parser of truncated items.
Does not know: which request's text is needed, or why.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pensieve_jax.history.connection import Connection

MAX_BYTES: Final = 32_768
"""Bytes of a request's items (JSON in ASCII) that are read; a user text that begins later is not found."""
_DECODER: Final = json.JSONDecoder()
_SEPARATORS: Final = re.compile(r"[\[,\s]*")
_ROLE: Final = re.compile(r'"role": *"user"')
_TEXT: Final = re.compile(r'"(?:text|content)": *"((?:[^"\\]++|\\u[0-9a-f]{4}|\\[^u])*+)')


def read_first_text(connection: Connection, rowid: int) -> str:
    """Return the beginning of the first user text in a response's own input, or "" without one."""
    return first_text(connection.beginning("responses", "input_items", rowid, MAX_BYTES))


def first_text(items: str) -> str:
    """Return the text of the first user item in a JSON list that may be truncated, or "" without one."""
    position = _end_of(_SEPARATORS, items, 0)
    while position < len(items) and items[position] == "{":
        try:
            item, position = _DECODER.raw_decode(items, position)
        except ValueError:  # the item is truncated
            return _text_of_truncated(items[position:])
        if item.get("role") == "user":
            return text_of(item)
        position = _end_of(_SEPARATORS, items, position)
    return ""


def text_of(item: dict[str, Any]) -> str:
    """Return the text of an item, with all its parts."""
    parts = item.get("content", "")
    if isinstance(parts, str):
        return parts
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _text_of_truncated(item: str) -> str:
    """Return the text of a truncated user item up to the cut, or "" if the role differs.

    Stored items have their role before their content.
    """
    role = _ROLE.search(item)
    text = None if role is None else _TEXT.search(item, role.end())
    if text is None:
        return ""
    decoded: str = json.loads(f'"{text[1]}"')
    return decoded.encode("utf-8", "ignore").decode()  # drop half a surrogate pair at the cut


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    return position if found is None else found.end()
