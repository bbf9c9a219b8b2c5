"""How a launcher starts, ends and is interrupted: installed commands and `scripts/` alike.

Owns: exit statuses, the end of a process whose reader has gone, the one line in which a typed error is
reported, and Ctrl-C that waits for the end of the step: an engine that is interrupted within a step gives up
all state on the device, so launchers ask `Interrupt.requested` between steps instead. Warnings of the
libraries are shown, and what they do is not, unless `--verbosity` says otherwise.
Does not know: what a launcher does, or its flags.
"""

from __future__ import annotations

import functools
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from absl import app, flags, logging

from pensieve_jax import ConfigError, PensieveError
from pensieve_jax.commands.help import define_help_flags, define_version_flag, missing_flags

FLAGS = flags.FLAGS
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_NO_READER = 128 + signal.SIGPIPE
_words: list[list[str]] = []
_checks: list[Callable[[], object]] = []
_NEEDED = {
    r"invalid literal for int\(\)": "an integer",
    "could not convert string to float": "a number",
    r"\('Non-boolean argument": "true or false",
}


def check_can_write(flag: str, path: Path) -> None:
    """Raise ConfigError, before hours of work, for a file that could not be written after them."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(flag, str(path), "a file in a directory that exists")


def until_reader_leaves(work: Callable[[], int]) -> int:
    """Do `work` and return its status; when whoever reads the output has gone, end it without a word."""
    _replace_closed_streams()
    try:
        status = work()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes once more at exit: that must find a reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_READER


def _replace_closed_streams() -> None:
    """Let the null device stand for what was closed at the start (`>&-`): Python has None there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # open to the end


def show(text: str) -> int:
    """Print `text` for as long as there is a reader; the exit status."""

    def write() -> int:
        print(text)
        return 0

    return until_reader_leaves(write)


def take_words() -> list[str]:
    """Have the command line take words beside flags; what is returned holds them once flags are parsed."""
    words: list[str] = []
    _words.append(words)
    return words


def check_first(check: Callable[[], object]) -> None:
    """Have `run` call `check` after it has parsed the flags; an error that `check` raises replaces `main`."""
    _checks.append(check)


def run(main: Callable[[], int]) -> None:
    """Parse flags, run `main` and exit with its status; bad flags and typed errors: one line and status 2.

    The docstring of the module of `main` is what `--help` begins with.
    """

    def checked_main() -> int:
        for check in _checks:
            check()
        return main()

    def guarded(argv: list[str]) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # replies may not fit the terminal's encoding
        if not FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        try:
            return until_reader_leaves(checked_main)
        except KeyboardInterrupt:  # before what imports JAX to know its errors
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except _typed_errors() as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT

    docstring = sys.modules[main.__module__].__doc__ or ""
    app.run(guarded, flags_parser=functools.partial(_parse, docstring))


def _typed_errors() -> tuple[type[Exception], ...]:
    """What is reported in a line. Asked for when something was raised: these packages import JAX."""
    from model_defs import ModelError
    from pallas_kernels.ragged_paged_attention import AttentionArgumentError

    return PensieveError, ModelError, AttentionArgumentError


def _parse(docstring: str, argv: list[str]) -> list[str]:
    """Set the flags. Ends the process for `--help`, and for a command line that cannot be used."""
    define_help_flags(docstring, show)
    define_version_flag(show)
    try:
        program, *rest = FLAGS(argv)
    except flags.Error as error:
        problems = [_in_words(str(error))]
    else:
        for words in _words:
            words[:], rest = rest, []
        problems = [f"unexpected arguments: {' '.join(rest)}"] if rest else []
        problems += missing_flags()
    if problems:
        print("error: " + "\n".join([*problems, "--help lists the flags."]), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    return [program]


def _in_words(problem: str) -> str:
    """What absl says of a flag that cannot be used, without Python's words for numbers that are none."""
    for reason, needed in _NEEDED.items():
        problem = re.sub(f"{reason}.*", f"must be {needed}", problem, flags=re.DOTALL)
    return problem


class Interrupt:
    """While it is entered, the first Ctrl-C only sets `requested`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
