"""Changes of an engine's state: by one thread at a time, and whole or known not to be.

Owns: which thread is in a call, and whether the latest change came to its end.
Does not know: what is changed, or how what was interrupted is made good.
Called by: engines, around what changes them.

An interrupt (Ctrl-C) may come between any two lines, in the middle of cleaning up after another one too. So
nothing here depends on code that runs afterwards: that nobody says "whole" means that it is not, and whether
somebody is in a call is asked of Python.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any, Concatenate, Protocol

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
    """Around every change.

    Attributes:
      interrupted: a change began and did not end, so nothing that it touched can be trusted.
    """

    def __init__(self) -> None:
        """Nobody is in a call."""
        self.interrupted = False
        self._thread: int | None = None
        self._call: Generator[Any] | None = None  # the latest

    def check_thread(self) -> None:
        """Raise PensieveError where somebody is in a call: another thread, or an observer of this one's."""
        if self._call is None or inspect.getgeneratorstate(self._call) != inspect.GEN_RUNNING:
            return
        if self._thread == threading.get_ident():
            raise PensieveError("The engine is in the middle of a call: an observer must not call it.")
        raise PensieveError("Another thread is in a call of the engine; one at a time may use it.")

    def run[T](self, change: Callable[[], T]) -> T:
        """What a change returns, which is whole only if it gets to its end, or refuses with a typed error."""
        self.interrupted = True
        self._thread = threading.get_ident()
        self._call = call = _generator_of(change)
        try:
            return next(call)  # kept out of variables: the traceback of an interrupt would keep it alive
        except PensieveError:  # it refused
            self.interrupted = False
            raise
        finally:
            if inspect.getgeneratorstate(call) == inspect.GEN_SUSPENDED:  # it returned
                self.interrupted = False


def _generator_of[T](change: Callable[[], T]) -> Generator[T]:
    """A call of which Python knows whether it is under way, however it ends."""
    yield change()
