"""Input of lines, which a user edits on a terminal or a pipe supplies.

Owns: the line editor and its settings, and the file that stores lines for the next session.
Does not know: the meaning of a line.

On a terminal the editor is GNU readline, by Python's own module. It does not cut lines at 4,096 bytes, as a
terminal's own editing does; arrows recall earlier lines; pasted text arrives as one message with its line
breaks. A Python built with libedit edits and recalls lines, too, but reads each pasted line as a message.
While a `LineInput` is entered, keys that come between two lines are not shown, and the next line begins with
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self, TextIO, cast

from pensieve_jax import InvalidRequestError
from pensieve_jax.commands.type_ahead import TypeAhead

MAX_NUM_KEPT = 1000
TERMINAL_BYTES = 4095  # longest line of the kernel's own editing, without its line break


class LineInput:
    """Reader of messages.

    Attributes:
      is_terminal: whether the input is a terminal.
    """

    def __init__(self, history_file: Path | None, words: Sequence[str] = ()) -> None:
        """Recall the lines of the file `kept`, and append to it; None stores none. Tab completes `words`.

        Raises InvalidRequestError, which names --line_history, if the file cannot be read or written.
        """
        self.is_terminal = sys.stdin.isatty()
        self._readline = _editor(words) if self.is_terminal and sys.stdout.isatty() else None
        self._history = None if self._readline is None or history_file is None else LineHistory(history_file)
        self._type_ahead = None if self._readline is None else TypeAhead(sys.stdin.fileno())
        self._last = ""
        if self._readline is not None and self._history is not None:
            for line in self._history.lines:
                self._readline.add_history(line)
                self._last = line

    def __enter__(self) -> Self:
        """Hide the keys that come between two lines; without a line editor, do nothing."""
        if self._type_ahead is not None:
            self._type_ahead.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal's settings."""
        if self._type_ahead is not None:
            self._type_ahead.__exit__(kind, error, trace)

    def read(self, prompt: str) -> str:
        r"""Return the next message. On a terminal it has line breaks from pasting, and after a \.

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
        if self._readline is not None and self._type_ahead is not None:
            return _edited(self._readline, self._type_ahead, prompt)
        line = input(prompt if self.is_terminal else "")
        if self.is_terminal and len(os.fsencode(line)) >= TERMINAL_BYTES:
            raise InvalidRequestError(
                "line",
                line,
                f"shorter than the {TERMINAL_BYTES + 1} bytes at which this terminal cuts lines",
                "do not redirect the output, or read the input from a pipe",
            )
        return line

    def _keep(self, message: str) -> None:
        if self._readline is None or not message.strip() or message == self._last:
            return
        self._last = message
        self._readline.add_history(message)
        if self._history is not None:
            self._history.add(message)


def _edited(readline: ModuleType, type_ahead: TypeAhead, prompt: str) -> str:
    """Let the user edit a line that begins with the keys typed before; return it."""
    typed = type_ahead.take()
    if "libedit" in (readline.__doc__ or ""):  # it would end the line at a line break
        typed = typed.replace("\n", " ")
    readline.set_startup_hook(lambda: readline.insert_text(typed))
    try:
        return input(prompt)
    finally:
        readline.set_startup_hook(None)
        type_ahead.hide()


def _editor(words: Sequence[str]) -> ModuleType | None:
    """Return a configured readline; None if Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)  # `_keep` adds whole messages instead of lines
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, state: _completion(words, text, state))
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return readline


def _completion(words: Sequence[str], text: str, state: int) -> str | None:
    """Return match number `state` of the words that begin with `text`, as readline requires."""
    found = [word for word in words if text and word.startswith(text)]
    return found[state] if state < len(found) else None


class LineHistory:
    """File of JSON strings, one message each, readable only by its owner. Several sessions may write it.

    Attributes:
      lines: the last `MAX_NUM_KEPT` messages, the oldest first.
    """

    def __init__(self, path: Path) -> None:
        """Read the file if it exists, and shorten it if it is too long; raise InvalidRequestError."""
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
            limit = "a file that can be read and written, or an empty value"
            raise InvalidRequestError("--line_history", str(path), limit, str(error)) from error
        self.lines = self.lines[-MAX_NUM_KEPT:]

    def add(self, line: str) -> None:
        """Append a message; ignore a failed write."""
        with contextlib.suppress(OSError), self._open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def _open(self, mode: str) -> TextIO:
        def private(path: str, flags: int) -> int:
            descriptor = os.open(path, flags, 0o600)
            os.fchmod(descriptor, 0o600)
            return descriptor

        return cast(TextIO, open(self._path, mode, encoding="utf-8", errors="replace", opener=private))


def _strings(lines: Iterable[str]) -> list[str]:
    """Return the strings among lines of JSON; skip all other lines."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, str):
                found.append(value)
    return found
