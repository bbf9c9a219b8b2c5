"""Start, end and interruption of a launcher, for installed commands and `scripts/`.

Owns: exit statuses, the exit after a broken pipe, the one-line report of a typed error, the log level of
libraries (warnings, unless `--verbosity` is set), and Ctrl-C. An engine that is interrupted within a step
loses all KV caches on the device, so launchers check `Interrupt.requested` between steps.
Does not know: the work of a launcher, or its flags.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from absl import app, flags, logging

from pensieve_jax import ConfigError, PensieveError
from pensieve_jax.commands.foreign_flags import hint
from pensieve_jax.commands.help import define_help_flags, define_version_flag, missing_flags
from pensieve_jax.commands.interrupts import EXIT_INTERRUPTED, exit_on_interrupt, raise_on_interrupt

FLAGS = flags.FLAGS
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NO_READER = 128 + signal.SIGPIPE
_words: list[list[str]] = []
_checks: list[Callable[[], object]] = []
_OTHER_ERRORS = {
    "model_defs.errors": "ModelError",
    "pallas_kernels.ragged_paged_attention": "AttentionArgumentError",
}
_NEEDED = {
    r"invalid literal for int\(\)": "an integer",
    "could not convert string to float": "a number",
    r"\('Non-boolean argument": "true or false",
}


def check_can_write(flag: str, path: Path) -> None:
    """Raise ConfigError for a file that cannot be written. Call it before the work that fills the file."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(flag, str(path), "a file in a directory that exists")


def until_reader_leaves(work: Callable[[], int]) -> int:
    """Run `work` and return its status. If the reader of stdout has gone, stop silently."""
    _replace_closed_streams()
    try:
        status = work()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_READER


def _replace_closed_streams() -> None:
    """Open the null device for streams that were closed at the start (`>&-`), which Python sets to None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # stays open until exit


def show(text: str) -> int:
    """Print `text`, also to a closed pipe; return the exit status."""

    def write() -> int:
        print(text)
        return 0

    return until_reader_leaves(write)


def take_words() -> list[str]:
    """Accept positional words on the command line. The returned list is filled when flags are parsed."""
    words: list[str] = []
    _words.append(words)
    return words


def check_first(check: Callable[[], object]) -> None:
    """Register a check that `run` calls after parsing the flags. If it raises, `main` does not run."""
    _checks.append(check)


def run(main: Callable[[], int]) -> None:
    """Parse flags, run `main` and exit with its status. Bad flags and typed errors print one line; status 2.

    The text of `--help` begins with the docstring of the module of `main`.
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
        raise_on_interrupt()
        try:
            return until_reader_leaves(checked_main)
        except KeyboardInterrupt:
            _leave_interrupted()
        except _typed_errors() as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
        finally:
            exit_on_interrupt()

    docstring = sys.modules[main.__module__].__doc__ or ""
    app.run(guarded, flags_parser=functools.partial(_parse, docstring))


def _leave_interrupted() -> NoReturn:
    """End the process after a KeyboardInterrupt has undone everything.

    A normal exit would still wait for threads that compile, and show the trace of a second Ctrl-C.
    """
    exit_on_interrupt()
    with contextlib.suppress(OSError):  # a reader has gone
        sys.stdout.flush()
        print("interrupted", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def _typed_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are reported in one line: those of the packages that are imported already.

    Importing the others would take seconds, because they import JAX, and they cannot have raised.
    """
    found: list[type[Exception]] = [PensieveError]
    for module, name in _OTHER_ERRORS.items():
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def _parse(docstring: str, argv: list[str]) -> list[str]:
    """Set the flags. Exit for `--help`, and for an invalid command line."""
    define_help_flags(docstring, show)
    define_version_flag(show)
    try:
        program, *rest = FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        problems = [hint(error.flagname) or str(error)]
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
    """Return absl's message about an invalid flag, with Python's messages about numbers replaced."""
    for reason, needed in _NEEDED.items():
        problem = re.sub(f"{reason}.*", f"must be {needed}", problem, flags=re.DOTALL)
    return problem


class Interrupt:
    """Context manager in which the first Ctrl-C sets `requested`, and the second raises KeyboardInterrupt."""

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
    """Escape control characters, since a model's reply must not control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str, max_len: int = 60) -> str:
    """Format `text` as one line of at most `max_len` characters, cut with an ellipsis."""
    escaped = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return escaped if len(escaped) <= max_len else escaped[: max_len - 1] + "…"
