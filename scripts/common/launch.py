"""How a launcher starts, ends and is interrupted.

Owns: exit statuses, the one line in which a typed error is reported, and Ctrl-C that waits for the end of
the step: an engine that is interrupted within a step gives up all state on the device, so launchers ask
`Interrupt.requested` between steps instead.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from absl import app

from model_defs import ModelError
from pensieve_jax import PensieveError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


def run(main: Callable[[], int]) -> None:
    """Parse flags, run `main` and exit with its status; typed errors become one line and status 2."""

    def guarded(argv: list[str]) -> int:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # replies may not fit the terminal's encoding
        try:
            return main()
        except (PensieveError, ModelError) as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED

    app.run(guarded)


class Interrupt:
    """While it is entered, the first Ctrl-C only sets `requested`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        """Nothing requested."""
        self.requested = False

    def __enter__(self) -> Self:
        """Take over SIGINT."""
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give SIGINT back."""
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def printable(text: str) -> str:
    """`text` with control characters escaped, since a model's reply must not drive the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str, max_len: int = 60) -> str:
    """`text` on one line of at most `max_len` characters, cut with an ellipsis."""
    escaped = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return escaped if len(escaped) <= max_len else escaped[: max_len - 1] + "…"
