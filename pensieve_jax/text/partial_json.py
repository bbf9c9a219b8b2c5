"""JSON that arrives in pieces: where a value ends, and the name and arguments of a call's object.

Owns: reading such text character by character, without a check that it is JSON.
Does not know: formats of calls, or what surrounds the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

SPACE: Final = " \t\r\n"


class JsonValue:
    """Reader of one JSON value: where it begins and ends, without a check of what is between.

    Attributes:
      is_over: whether the value is complete, or a mark has ended it.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = self._is_escaped = self._has_begun = False
        self._taken: list[str] = []
        self._spaces = ""

    def read(self, text: str, marks: Collection[str] = ()) -> int:
        """Read text of the value, and return how many characters were read.

        One of `marks` outside of a string ends the value; it is not read, nor is its beginning at the end.
        """
        first = {mark[0] for mark in marks}
        begin = None
        for at, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    self.is_over = self._depth == 0
            elif character in first and any(text.startswith(mark, at) for mark in marks):
                self.is_over = True
                return self._read_up_to(text, begin, at)
            elif character in first and any(mark.startswith(text[at : at + len(mark)]) for mark in marks):
                return self._read_up_to(text, begin, at)
            elif not self._has_begun and character in SPACE:
                continue
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if not self._depth:
                    self.is_over = True
                    return self._read_up_to(text, begin, at)
                self._depth -= 1
                self.is_over = self._depth == 0
            elif not self._depth and character in ", \t\r\n":
                self.is_over = True
                return self._read_up_to(text, begin, at)
            self._has_begun = True
            if begin is None:
                begin = at
            if self.is_over:
                return self._read_up_to(text, begin, at + 1)
        return self._read_up_to(text, begin, len(text))

    def take(self) -> str:
        """Return what was read since the last call, without white space that may be behind the value."""
        text = self._spaces + "".join(self._taken)
        self._taken.clear()
        ready = text.rstrip(SPACE)
        self._spaces = text[len(ready) :]
        return ready

    @property
    def holds_space(self) -> bool:
        """Whether `take` holds white space back."""
        return bool(self._spaces)

    def rest(self) -> str:
        """Return what `take` holds back; after it the value has no more text."""
        text, self._spaces = self._spaces, ""
        return text if self._in_string else ""

    def _read_up_to(self, text: str, begin: int | None, end: int) -> int:
        if begin is not None:
            self._taken.append(text[begin:end])
        return end


_ARGUMENTS: Final = ("arguments", "parameters")


class CallObject:
    """Reader of an object with a name and arguments in any order.

    Attributes:
      name: value of the key "name", once it is complete; None before.
      has_begun, is_over: whether its first and its last character were read.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_begun = self.is_over = False
        self._phase = "key"
        self._key = ""
        self._value = JsonValue()
        self._text: list[str] = []
        self._arguments: list[str] = []
        self._arguments_begun = False

    def read(self, text: str, marks: Collection[str]) -> int:
        """Read text of the object, and return how many characters were read; see `JsonValue.read`."""
        at = 0
        if not self.has_begun:
            assert text[0] == "{"
            self.has_begun, at = True, 1
        while at < len(text) and not self.is_over:
            if self._phase in ("value", "in key"):
                num_read = self._value.read(text[at:], marks)
                at += num_read
                self._take()
                if not self._value.is_over:
                    break
                self._end_value()
            elif any(text.startswith(mark, at) for mark in marks):
                self.is_over = True
            elif any(mark.startswith(text[at:]) for mark in marks):
                break
            elif self._phase == "key" and text[at] == "}":
                self.is_over = True
                at += 1
            elif self._phase == "key" and text[at] == '"':
                self._phase, self._value = "in key", JsonValue()
            elif self._phase == "colon" and text[at] == ":":
                self._phase, self._value = "value", JsonValue()
                at += 1
            else:
                at += 1  # white space, a comma, or a model's slip
        return at

    def take_arguments(self) -> str:
        """Return the arguments that were read since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def rest(self) -> str:
        """Return what was held back of arguments that the reply's end cuts."""
        text = "".join(self._text) + self._value.rest()
        return text if self._phase == "value" and self._key in _ARGUMENTS else ""

    def _take(self) -> None:
        text = self._value.take()
        is_quoted = self._text or text.startswith('"')  # some models write the arguments as a string
        if self._phase == "value" and self._key in _ARGUMENTS and (self._arguments_begun or not is_quoted):
            self._arguments_begun |= bool(text)
            self._arguments.append(text)
        else:
            self._text.append(text)

    def _end_value(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        if self._phase == "in key":
            self._phase, self._key = "colon", _unquoted(text)
            return
        self._phase = "key"
        if self._key == "name" and self.name is None:
            self.name = _unquoted(text)
        elif self._key in _ARGUMENTS and text:
            self._arguments.append(_unquoted(text))


def _unquoted(text: str) -> str:
    """Return the text of a JSON string; return any other text unchanged."""
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text.strip('"')
