"""Arguments that a model does not write as JSON: texts between tags, and calls in Python.

Owns: their conversion to JSON values.
Does not know: formats of calls, or what surrounds these texts.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection
from typing import Any, Final

from pensieve_jax.text.argument_schemas import TYPE_NAMES, Choices, Text, argument_form, key_of, types_of
from pensieve_jax.text.call_arguments import check_depth
from pensieve_jax.text.partial_json import SPACE

CLOSING_TAG: Final = "</parameter>"
"""Text behind an argument that stands between tags."""
_STRING_OR_TAG: Final = re.compile(f'"|{CLOSING_TAG}')
_END_IN_STRING: Final = re.compile(r'\\[^\x00-\x1f]|["\x00-\x1f]')
_LONGEST_PART: Final = len(CLOSING_TAG) - 1
"""Characters at the end of a text that may be the beginning of a tag, or of an escape."""


def argument_of(text: str, schema: Any, root: Any = None) -> str:
    """Return an argument as JSON: the text, unless its schema has other types and the text is one of them.

    A text is also taken from its JSON string where the schema narrows it by more than values and lengths.

    Args:
      text: the argument as the model wrote it.
      schema: its schema, which no one has checked.
      root: the schema of all parameters, where references begin.
    """
    form, types = argument_form(schema, root), types_of(schema, root)
    found = chosen(text, form) if isinstance(form, Choices) else ()
    is_text = form is not None and (not types or types == {"string"})
    (value,) = found or (text if is_text else _value_of(text, types),)
    return json.dumps(value, ensure_ascii=False)


def chosen(text: str, choices: Choices) -> tuple[Any, ...]:
    """Return the value that a text stands for, or (); strings stand for themselves, or are JSON."""
    try:
        value = _parsed(text)
    except ValueError:
        value = text
    is_string = isinstance(value, str)
    for one in (text, value) if is_string else (value, text):
        if key_of(one) in choices.values:
            return (one,)
    return ()


def written_choice(value: Any, choices: Choices) -> str | None:
    """Return the text between tags that is read as one of some values; None if no text is."""
    texts = [value] if isinstance(value, str) else []
    written = json.dumps(value, ensure_ascii=False)
    for text in (*texts, written, written.replace("</", "<\\/")):
        found = chosen(text, choices)
        if CLOSING_TAG not in text and found and key_of(found[0]) == key_of(value):
            return text
    return None


class ClosingTag:
    """Search for the tag behind an argument in text that arrives in pieces; it reads each once.

    An argument that its schema does not let be a plain text is written as JSON, and tags within its strings
    are text. If a string has a line break, or what seems to be JSON with a tag is not, the argument ends at
    its first tag. So does one with a string that is still open at the end of the reply (`take_as_text`).

    Attributes:
      is_in_string: whether the end of the text that was searched is within a string of JSON.
    """

    def __init__(self, schema: Any, root: Any) -> None:
        """Search behind an argument of this schema; see `argument_of` for both."""
        self._may_be_json = not isinstance(argument_form(schema, root), Text)
        self._at: int | None = None
        self.is_in_string = False

    def take_as_text(self) -> None:
        """Search for the first tag from now on: the argument is not JSON."""
        self._may_be_json = self.is_in_string = False
        self._at = None

    def find(self, text: str, begin: int) -> int | None:
        """Return where the tag begins; None before the end of the argument.

        The argument begins at `begin`. Each further call has the same text with more behind it.
        """
        if self._at is None:
            first = text[begin:].lstrip(SPACE)[:1]
            if self._may_be_json and not first:
                return None
            self._may_be_json &= first in '{["'
            self._at = begin
        while self._may_be_json:
            pattern = _END_IN_STRING if self.is_in_string else _STRING_OR_TAG
            found = pattern.search(text, self._at)
            if found is None:
                break
            if found[0] == CLOSING_TAG:
                first_at = text.find(CLOSING_TAG, begin)
                has_tag = first_at < found.start()
                return first_at if has_tag and not _is_json(text[begin : found.start()]) else found.start()
            if found[0] < " ":
                self._may_be_json = self.is_in_string = False
                self._at = begin
            else:
                self.is_in_string ^= found[0] == '"'
                self._at = found.end()
        else:
            at = text.find(CLOSING_TAG, self._at)
            if at >= 0:
                return at
        self._at = max(self._at, len(text) - _LONGEST_PART)
        return None


def _is_json(text: str) -> bool:
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


def _value_of(text: str, types: Collection[str]) -> Any:
    try:
        value = _parsed(text)
    except ValueError:
        lowered = text.strip().lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered == "true"
        return None if "null" in types and lowered in ("null", "none") else text
    # A text that only looks like a number stays one where strings are allowed and numbers are not.
    if "string" in types and TYPE_NAMES[type(value)].isdisjoint(types):
        return text
    return value


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError for any other, and for one that is too deep."""
    check_depth(text)
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError
    return value


class PythonCallEnd:
    """Search for the end of the first call of a list in text that arrives in pieces; it reads each once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""
        self._is_escaped = self._has_begun = False

    def find(self, text: str) -> int | None:
        """Return where the first call ends, or the list itself; None before the end.

        The text begins with "[", or behind a call. Each further call has the same text with more behind it.
        """
        for at in range(self._at, len(text)):
            character = text[at]
            has_begun = self._has_begun
            self._has_begun = has_begun or character not in SPACE
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character == "[" and not has_begun:
                continue  # the list's own bracket
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                if not self._depth:
                    return at + 1
                self._depth -= 1
                if not self._depth and character == ")":
                    return at + 1
        self._at = len(text)
        return None


PYTHON_NAME: Final = r"([\w.:-]+)[ \t]*\("
"""A tool's name and the bracket behind it. Names of tools need not be identifiers of Python."""
ARGUMENT_NAME: Final = r"""[^\s=(),"'\[\]{}\\#]+"""
"""A name of an argument, which need not be an identifier either."""
_PYTHON_CALL: Final = re.compile(PYTHON_NAME)
_STRING_OR_ARGUMENT: Final = re.compile(
    rf"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([(,]\s*)({ARGUMENT_NAME})(\s*=)(?!=)""", re.DOTALL
)


def python_call(text: str) -> tuple[str, str] | None:
    """Return the name of a call and its arguments as JSON, or None for other text."""
    text = text.lstrip(SPACE + ",[")
    begun = _PYTHON_CALL.match(text)
    if begun is None:
        return None
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        """Return a string as it is, and the name of an argument as an identifier of Python."""
        if found[1] is not None:
            return found[1]
        return f"{found[2]}_{numbers.setdefault(found[3], len(numbers))}{found[4]}"

    try:
        arguments = _ESCAPE.sub(_python_escape, _STRING_OR_ARGUMENT.sub(numbered, text[begun.end() - 1 :]))
        tree = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            return None
        names, values = list(numbers), {}
        for one in tree.keywords:
            if one.arg is None:  # `**` and a value
                return None
            values[names[int(one.arg[1:])]] = _literal(one.value)
        return begun[1], json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


_ESCAPE: Final = re.compile(r"\\([0-7]{1,3}|.)", re.DOTALL)
_PYTHON_ESCAPES: Final = "\n\\'\"abfnrtvxNuU"
_MAX_OCTAL: Final = 0o377


def _python_escape(found: re.Match[str]) -> str:
    """Return an escape in a string as Python reads it: JSON's slash, and no escapes that Python warns of."""
    text = found[1]
    if text == "/":
        return text
    is_known = int(text, 8) <= _MAX_OCTAL if text[0] in "01234567" else text in _PYTHON_ESCAPES
    return found[0] if is_known else "\\" + found[0]


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, with JSON's words for True, False and None allowed."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:  # `**` and a value
            raise ValueError
        return {
            _literal(key): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)
