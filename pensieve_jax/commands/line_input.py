"""Lines as people type them: edited, recalled, pasted; or as a pipe gives them.

Owns: which library edits lines, what it is told, and the file that keeps lines for the next session.
Does not know: what a line means.

On a terminal it is GNU readline, by Python's own module: no line is cut at the 4,096 bytes at which a
terminal cuts those that it edits itself, arrows recall earlier ones, and what is pasted arrives as one
message, line breaks and all. A Python that was built with libedit edits and recalls as well, but takes each
pasted line for a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO, cast

from pensieve_jax import InvalidRequestError

MAX_NUM_KEPT = 1000
TERMINAL_BYTES = 4095  # a line of the kernel's own editing, without its end


class LineInput:
    """Reads one message after the other.

    Attributes:
      is_terminal: somebody types.
    """

    def __init__(self, kept: Path | None, words: Sequence[str] = ()) -> None:
        """Recalls the lines of `kept`, and adds to it; None keeps none. Tab completes `words`.

        Raises InvalidRequestError naming --line_history where the file cannot be read or written.
        """
        self.is_terminal = sys.stdin.isatty()
        self._readline = _editor(words) if self.is_terminal and sys.stdout.isatty() else None
        self._kept = None if self._readline is None or kept is None else KeptLines(kept)
        self._last = ""
        if self._readline is not None and self._kept is not None:
            for line in self._kept.lines:
                self._readline.add_history(line)
                self._last = line

    def read(self, prompt: str) -> str:
        r"""The next message; on a terminal it may have line breaks, pasted ones and those behind a \.

        Raises EOFError, KeyboardInterrupt, and InvalidRequestError for a line that the terminal cut.
        """
        lines = [self._read_line(prompt)]
        while self.is_terminal and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._read_line("... "))
            except EOFError:
                break
        message = "\n".join(lines)
        self._keep(message)
        return message

    def _read_line(self, prompt: str) -> str:
        line = input(prompt if self.is_terminal else "")
        if self.is_terminal and self._readline is None and len(os.fsencode(line)) >= TERMINAL_BYTES:
            raise InvalidRequestError(
                "line",
                line,
                f"shorter than the {TERMINAL_BYTES + 1} bytes at which this terminal cuts",
                "let the output go to the terminal as well, or the input come from a pipe",
            )
        return line

    def _keep(self, message: str) -> None:
        if self._readline is None or not message.strip() or message == self._last:
            return
        self._last = message
        self._readline.add_history(message)
        if self._kept is not None:
            self._kept.add(message)


def _editor(words: Sequence[str]) -> ModuleType | None:
    """Readline, set up; None where Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)  # messages are kept whole, not by the line
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, state: _completion(words, text, state))
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return readline


def _completion(words: Sequence[str], text: str, state: int) -> str | None:
    """The word number `state` that begins with `text`, as readline asks for them."""
    found = [word for word in words if text and word.startswith(text)]
    return found[state] if state < len(found) else None


class KeptLines:
    """A file of JSON strings, a message each, that only its owner may read: sessions may write it at once.

    Attributes:
      lines: the last `MAX_NUM_KEPT`, the oldest first.
    """

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one, and shorten one that has grown; raises InvalidRequestError."""
        self._path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open("a+") as file:
                file.seek(0)
                self.lines = _strings(file)
            if len(self.lines) > 2 * MAX_NUM_KEPT:
                with self._open("w") as file:
                    file.writelines(f"{json.dumps(line)}\n" for line in self.lines[-MAX_NUM_KEPT:])
        except OSError as error:
            limit = "a file that can be read and written, or empty"
            raise InvalidRequestError("--line_history", str(path), limit, str(error)) from error
        self.lines = self.lines[-MAX_NUM_KEPT:]

    def add(self, line: str) -> None:
        """Append a message; one that cannot be written is not kept."""
        with contextlib.suppress(OSError), self._open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def _open(self, mode: str) -> TextIO:
        def private(path: str, flags: int) -> int:
            descriptor = os.open(path, flags, 0o600)
            os.fchmod(descriptor, 0o600)
            return descriptor

        return cast(TextIO, open(self._path, mode, encoding="utf-8", errors="replace", opener=private))


def _strings(lines: Iterable[str]) -> list[str]:
    """The strings among lines of JSON; what else is there is left out."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, str):
                found.append(value)
    return found
