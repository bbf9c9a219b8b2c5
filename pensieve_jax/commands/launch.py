"""How a launcher starts, ends and is interrupted.

Owns: exit statuses, the one line in which a typed error is reported, and Ctrl-C that waits for the end of
the step: an engine that is interrupted within a step gives up all state on the device, so launchers ask
`Interrupt.requested` between steps instead. Warnings of the libraries are shown, and what they do is not,
unless `--verbosity` says otherwise.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from absl import app, flags, logging

from model_defs import ModelError
from pallas_kernels.ragged_paged_attention import AttentionArgumentError
from pensieve_jax import ConfigError, PensieveError

FLAGS = flags.FLAGS
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_NO_READER = 128 + signal.SIGPIPE


def check_can_write(flag: str, path: Path) -> None:
    """Raise ConfigError, before hours of work, for a file that could not be written after them."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(flag, str(path), "a file in a directory that exists")


def run(main: Callable[[], int]) -> None:
    """Parse flags, run `main` and exit with its status; bad flags and typed errors: one line and status 2.

    When whoever reads the output has gone, that is the end, without a word.
    """

    def guarded(argv: list[str]) -> int:
        if len(argv) > 1:
            print(f"error: unexpected arguments: {' '.join(argv[1:])}", file=sys.stderr)
            return EXIT_BAD_INPUT
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # replies may not fit the terminal's encoding
        if not FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        try:
            status = main()
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # Python flushes once more at exit: that must find a reader.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_NO_READER
        except (PensieveError, ModelError, AttentionArgumentError) as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    """The arguments that are no flags; ends the process for flags that cannot be read."""
    try:
        rest: list[str] = FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}\n--help lists the flags.", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    return rest


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
