"""Changes of an engine's state: by one thread at a time, and whole or known not to be.

Owns: which calls are under way, and whether the latest change came to its end.
Does not know: what is changed, or how what was interrupted is made good.

An interrupt (Ctrl-C) may come between any two lines, in the middle of cleaning up after another one too. So
nothing here depends on code that runs afterwards. A call is under way while its frame is on a stack, and
Python is asked whether it is.

Another thread may come between any two lines, too. A call enters its frame into a table before it looks for
others, and only the first one in the table that is under way may change anything. Of two calls that race, the
second to enter finds the first.
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
    """What has a guard."""

    _guard: ChangeGuard

    def _check_usable(self) -> None:
        """Raise where it cannot be changed now."""
        ...


def change[S: Guarded, **P, T](method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that changes what an engine knows: one at a time, and whole or known not to be."""

    @wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_usable()
        return self._guard.run(lambda: method(self, *args, **kwargs))

    return guarded


class ChangeGuard:
    """Lets one call at a time change an engine's state, and notices a change that was interrupted."""

    def __init__(self, recover: Callable[[], None]) -> None:
        """Start with nothing interrupted.

        `recover` makes good what was interrupted. It is called as a part of the next call, which raises what
        it raises; the one after that tries again.
        """
        self._recover = recover
        self._calls: dict[FrameType, int] = {}  # the thread of each call, in the order in which they entered
        self._is_half = False  # a change began, and has not come to its end

    @property
    def interrupted(self) -> bool:
        """A change began and did not end, so that nothing that it touched can be trusted."""
        return self._is_half and not any(_is_under_way(frame) for frame in self._calls.copy())

    def check_thread(self) -> None:
        """Raise PensieveError where somebody is in a call: another thread, or an observer of this one's."""
        self._check_first(None)

    def check(self) -> None:
        """The same, and make good what was interrupted."""
        self.run(_nothing)

    def run[T](self, change: Callable[[], T]) -> T:
        """What a change returns, which is whole only if it gets to its end, or refuses with a typed error."""
        # The frame is in no variable: as one of its own variables it would keep itself alive.
        try:
            self._calls[sys._getframe()] = threading.get_ident()
            self._check_first(sys._getframe())
            if self._is_half:
                self._recover()
            self._is_half = change is not _nothing
            try:
                result = change()
            except PensieveError:  # it refused
                self._is_half = False
                raise
            self._is_half = False
            return result
        finally:
            self._calls.pop(sys._getframe(), None)

    def _check_first(self, own: FrameType | None) -> None:
        """Raise PensieveError where a call that entered before `own`, or any call, is under way."""
        for frame, thread in self._calls.copy().items():
            if frame is own:
                return
            if not _is_under_way(frame):  # an interrupt kept it from leaving
                self._calls.pop(frame, None)
            elif thread == threading.get_ident():
                raise PensieveError("The engine is in the middle of a call: an observer must not call it.")
            else:
                raise PensieveError("Another thread is in a call of the engine; one at a time may use it.")


def _is_under_way(frame: FrameType) -> bool:
    """Whether a frame is on a stack; one that is not loses its variables, which nobody needs any more.

    Following the frames of the other thread would be no answer: a generator that is suspended meanwhile
    breaks their chain.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _nothing() -> None:
    """Change nothing: `ChangeGuard.check` runs this in place of a change."""
