"""Keys that are typed while a program works: the terminal hides them, and the next line begins with them.

Owns: the terminal's settings while no line is edited, and the conversion of pending keys to text.
Does not know: who edits the line, or what it means.

Meanwhile the terminal itself still edits the typed line (backspace), and Ctrl-C discards it.
"""

from __future__ import annotations

import os
import re
import termios
from types import TracebackType
from typing import Any, Self

_LOCAL_FLAGS, _CHARACTERS = 3, 6  # places in the list of `termios.tcgetattr`
_KEYS = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)  # arrows and the like
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class TypeAhead:
    """Terminal that shows no keys while this is entered, except between `take` and `hide`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._shown: list[Any] | None = None

    def __enter__(self) -> Self:
        """Stop showing keys until `take`."""
        self._shown = termios.tcgetattr(self._descriptor)
        self.hide()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal's settings, and discard pending keys, which a shell would run as a command."""
        self._set(0)
        termios.tcflush(self._descriptor, termios.TCIFLUSH)
        self._shown = None

    def hide(self) -> None:
        """Stop showing keys, after `take`."""
        self._set(termios.ECHO)

    def take(self) -> str:
        """Return the pending keys as text, without a last line break, and show keys again."""
        if self._shown is None:
            return ""
        self._set(termios.ECHO | termios.ICANON)  # without lines, so that an unfinished one can be read
        keys = b""
        while more := os.read(self._descriptor, 1 << 16):
            keys += more
        self._set(0)
        return text_of(keys)

    def _set(self, without: int) -> None:
        """Set the original settings without some local flags; without lines, a read does not wait."""
        if self._shown is None:
            return
        settings = [*self._shown]
        settings[_LOCAL_FLAGS] &= ~without
        if without & termios.ICANON:
            settings[_CHARACTERS] = [*settings[_CHARACTERS]]
            settings[_CHARACTERS][termios.VMIN] = settings[_CHARACTERS][termios.VTIME] = 0
        termios.tcsetattr(self._descriptor, termios.TCSANOW, settings)


def text_of(keys: bytes) -> str:
    """Return the text of typed keys, without those that move or control, and without a last line break."""
    text = _KEYS.sub("", keys.decode("utf-8", "replace"))
    return _CONTROLS.sub("", text).rstrip("\n")
