"""What a user said first, read from the beginning of a request's items: a message may be a book.

Owns: how much is read, and how items are understood whose end is not there.
Does not know: which request it is.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pensieve_jax.history.connection import Connection

MAX_BYTES: Final = 32_768
"""Of a request's items, as JSON in ASCII; a user who begins to speak behind that is not heard."""
_DECODER: Final = json.JSONDecoder()
_BETWEEN: Final = re.compile(r"[\[,\s]*")
_ROLE: Final = re.compile(r'"role": *"user"')
_TEXT: Final = re.compile(r'"(?:text|content)": *"((?:[^"\\]++|\\u[0-9a-f]{4}|\\[^u])*+)')


def read_first_text(connection: Connection, rowid: int) -> str:
    """What the user said first in a response's own input, or the beginning of it; "" for nothing."""
    return first_text(connection.beginning("responses", "input_items", rowid, MAX_BYTES))


def first_text(items: str) -> str:
    """The text of the first item of a user; of a list in JSON that may end anywhere."""
    position = _end_of(_BETWEEN, items, 0)
    while position < len(items) and items[position] == "{":
        try:
            item, position = _DECODER.raw_decode(items, position)
        except ValueError:  # the item is cut
            return _text_of_cut(items[position:])
        if item.get("role") == "user":
            return text_of(item)
        position = _end_of(_BETWEEN, items, position)
    return ""


def text_of(item: dict[str, Any]) -> str:
    """What an item says, with all its parts."""
    parts = item.get("content", "")
    if isinstance(parts, str):
        return parts
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _text_of_cut(item: str) -> str:
    """The first part of an item without its end; its role stands before what it says, as items are kept."""
    role = _ROLE.search(item)
    text = None if role is None else _TEXT.search(item, role.end())
    if text is None:
        return ""
    said: str = json.loads(f'"{text[1]}"')
    return said.encode("utf-8", "ignore").decode()  # without the first half of a character of two


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    return position if found is None else found.end()
