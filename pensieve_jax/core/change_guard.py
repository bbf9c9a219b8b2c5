"""Changes of an engine's state: by one thread at a time, and either complete or known to be incomplete.

Owns: which calls are running, and whether the latest change was completed.
Does not know: what is changed, or how an interrupted change is repaired.

An interrupt (Ctrl-C) may come between any two lines, even while the effects of another one are cleaned up. So
nothing here depends on code that runs afterwards, such as the release of a lock. Instead, a call counts as
running while its frame is on a stack, and Python is asked whether it is.

Another thread may also run between any two lines. A call enters its frame into a table before it looks for
other calls, and only the first running call in the table may change anything. If two calls race, the second
to enter finds the first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Concatenate, Protocol

from pensieve_jax.core.errors import PensieveError


class Guarded(Protocol):
    """An object with a guard."""

    _guard: ChangeGuard

    def _check_usable(self) -> None:
        """Raise an error if the object cannot be changed now."""
        ...


def change[S: Guarded, **P, T](method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make `method` a guarded change: one at a time, and either complete or known to be incomplete."""

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_usable()
        return self._guard.run(lambda: method(self, *args, **kwargs))

    return guarded


class ChangeGuard:
    """A guard that lets one call at a time change an engine's state, and notices interrupted changes."""

    def __init__(self, recover: Callable[[], None]) -> None:
        """Start without an interrupted change.

        `recover` repairs the state after an interrupted change. It runs as part of the next call. If it
        raises, so does that call, and the next one tries again.
        """
        self._recover = recover
        self._calls: dict[FrameType, int] = {}  # thread of each call, in the order in which calls entered
        self._is_half = False  # a change has begun and not been completed

    @property
    def interrupted(self) -> bool:
        """Whether a change began and did not end, so that nothing that it touched can be trusted."""
        return self._is_half and not any(_is_under_way(frame) for frame in self._calls.copy())

    def check_thread(self) -> None:
        """Raise PensieveError if a call is running, of another thread or of this one (from an observer)."""
        self._check_first(None)

    def check(self) -> None:
        """Raise PensieveError as `check_thread` does, and repair an interrupted change."""
        self.run(_nothing)

    def run[T](self, change: Callable[[], T]) -> T:
        """Run `change` and return its result. A PensieveError means that it refused and changed nothing."""
        # Keep the frame in no local variable: it would be one of its own variables and keep itself alive.
        try:
            self._calls[sys._getframe()] = threading.get_ident()
            self._check_first(sys._getframe())
            if self._is_half:
                self._recover()
            self._is_half = change is not _nothing
            try:
                # The result stays out of a variable. A traceback that is kept keeps variables, and so turns
                # whose caller was interrupted before it got them.
                return (change(), self._complete())[0]
            except PensieveError:  # it refused, so nothing was changed
                self._is_half = False
                raise
        finally:
            self._calls.pop(sys._getframe(), None)

    def _complete(self) -> bool:
        """End the change; return True, so that it can be called within an expression."""
        self._is_half = False
        return True

    def _check_first(self, own: FrameType | None) -> None:
        """Raise PensieveError if a call is running that entered before `own`; if `own` is None, any call."""
        for frame, thread in self._calls.copy().items():
            if frame is own:
                return
            if not _is_under_way(frame):  # an interrupt prevented its removal from the table
                self._calls.pop(frame, None)
            elif thread == threading.get_ident():
                raise PensieveError("The engine is in the middle of a call; an observer must not call it.")
            else:
                raise PensieveError("Another thread is using the engine; only one may use it at a time.")


def _is_under_way(frame: FrameType) -> bool:
    """Return whether a frame is on a stack, and clear its variables if not.

    Python has no plain question for that, but `clear` raises RuntimeError for a frame on a stack. Clearing
    the frame of an ended call is harmless, because its variables are not needed any more. Walking the frames
    of the other thread would not work: a generator that is suspended meanwhile breaks their chain.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _nothing() -> None:
    """Do nothing: `ChangeGuard.check` runs this in place of a change."""
