"""The arguments of a tool call: JSON text in a message, an object in a chat template.

Owns: parsing this text, halves of characters in it, its canonical form, and the object that templates read.
Does not know: messages, tools' schemas, or how a model writes a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn, Self

MAX_DEPTH: Final = 100
"""Deepest nesting of brackets. Readers and writers of JSON, and templates, are recursive."""


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the object that the text of a call's arguments holds; blank text is an empty object.

    Raises ValueError for any other text, also for one that `check_depth` refuses.
    """
    if not text.strip():
        return {}
    check_depth(text)
    value = json.loads(text, parse_constant=_refuse_constant)
    if "\\u" in text and _SURROGATE.search(written := json.dumps(value, ensure_ascii=False)):
        value = json.loads(without_surrogates(written))  # escapes of halves of characters
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {'list' if isinstance(value, list) else 'value'}, not an object")
    return value


def check_depth(text: str) -> None:
    """Raise ValueError for JSON with more than `MAX_DEPTH` brackets within each other."""
    depth = 0
    for found in _STRING_OR_BRACKET.findall(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found, 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"brackets are nested more than {MAX_DEPTH} deep")


def without_surrogates(text: str) -> str:
    """Join pairs of surrogates, which escapes in JSON and Python give, and replace others by U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def canonical_arguments(text: str) -> str:
    """Return a text that is the same for all spellings of these arguments.

    Clients parse arguments and write them again, with other white space, or 1 in place of 1.0. Any text but a
    JSON object is returned unchanged, as is one nested too deeply to be compared.
    """
    try:
        return json.dumps(_whole_numbers(parse_arguments(text)), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


class CallArguments(dict[str, Any]):
    """Arguments as a chat template reads them: an object that is also written as its text.

    Most templates write `arguments | tojson` or read single arguments. Some concatenate the text, which `str`
    returns. It is no public attribute: a template's `arguments.text` is the argument of this name.
    """

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        """Hold the arguments of `value`, written as `text`."""
        super().__init__(value)
        self._text = text

    @classmethod
    def canonical(cls, text: str) -> Self:
        """Return arguments that are written as transformers' `tojson` writes the object."""
        value = parse_arguments(text)
        return cls(value, json.dumps(value, ensure_ascii=False))

    @classmethod
    def sampled(cls, text: str) -> Self:
        """Return arguments that are written as the model spelled them, so that its token ids can stay.

        Any text but a JSON object has no single arguments.
        """
        try:
            return cls(parse_arguments(text), text)
        except ValueError:
            return cls({}, text)

    def __str__(self) -> str:
        """Return the text, for `{{ arguments }}` and the operator `~`."""
        return self._text

    def __add__(self, after: str) -> str:
        """Concatenate the text with `after`."""
        return self._text + after

    def __radd__(self, before: str) -> str:
        """Concatenate `before` with the text."""
        return before + self._text


def _whole_numbers(value: Any) -> Any:
    """Return a JSON value in which a whole number is an integer; JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
