"""Ctrl-C before and after the work of a command: one line, and exit status 130.

Owns: the handler for these times. `launch.Interrupt` handles Ctrl-C within the work.
Does not know: commands. This module imports little, so that the handler is there before the imports that take
seconds: a KeyboardInterrupt within an import would be shown with a trace, or lost in a destructor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT
_DROPPED = ("_xla_gc_callback", "__del__")  # JAX's callback runs often while arrays are made
_AGAIN_S = 0.001
_SHOWN = b"interrupted\n"


def exit_on_interrupt() -> None:
    """Let Ctrl-C end this process at once. A process that ignores Ctrl-C continues to."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


@contextlib.contextmanager
def exiting_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end this process at once, while a command loads and has nothing to undo.

    A KeyboardInterrupt can be lost in the imports and compilations of a start, or wait for threads.
    """
    before = signal.getsignal(signal.SIGINT)
    exit_on_interrupt()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt. A process that ignores Ctrl-C continues to."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _raise)


def _raise(signal_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but only outside of functions whose exceptions Python drops."""
    while frame is not None:
        if frame.f_code.co_name in _DROPPED:
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal_number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _exit(signal_number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(2, _SHOWN)
    os._exit(EXIT_INTERRUPTED)
