"""Ctrl-C before and after the work of a command: one line, and exit status 130.

Owns: the handler for these times. `launch.Interrupt` handles Ctrl-C within the work.
Does not know: commands. This module imports little, so that the handler is there before the imports that take
seconds: a KeyboardInterrupt within an import would be shown with a trace, or lost in a destructor.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT
_SHOWN = b"interrupted\n"


def exit_on_interrupt() -> None:
    """Let Ctrl-C end this process at once. A process that ignores Ctrl-C continues to."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, which is Python's default, after `exit_on_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(signal_number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(2, _SHOWN)
    os._exit(EXIT_INTERRUPTED)
