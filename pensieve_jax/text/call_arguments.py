"""The arguments of a tool call: JSON text in a message, an object in a chat template.

Owns: parsing this text, its canonical form, and the object that templates read.
Does not know: messages, tools' schemas, or how a model writes a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, Self


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the object that the text of a call's arguments holds; blank text is an empty object.

    Raises ValueError for any other text.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {'list' if isinstance(value, list) else 'value'}, not an object")
    return value


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
