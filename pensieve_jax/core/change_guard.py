"""Changes of an engine's state: by one thread at a time, and whole or known not to be.

Owns: which thread is in a call, and whether the latest change came to its end.
Does not know: what is changed, or how what was interrupted is made good.

An interrupt (Ctrl-C) may come between any two lines, in the middle of cleaning up after another one too. So
nothing here depends on code that runs afterwards. Whether somebody is in a call, and how it ended, is asked
of Python: a call is a generator, which is running, or suspended where its change is whole, or closed.

Another thread may come between any two lines, too. A call is under way already when it takes its place behind
the latest one, which has ended: by one operation of a dict, so that of two calls one does, and is running for
whoever finds it there. Nobody but the latest call changes anything.
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
    """Around every change."""

    def __init__(self, recover: Callable[[], None]) -> None:
        """Nobody is in a call.

        `recover` makes good what was interrupted. It is called as a part of the next call, which raises what
        it raises; the one after that tries again.
        """
        self._recover = recover
        self._latest = _Call()  # or one that is followed by it

    @property
    def interrupted(self) -> bool:
        """A change began and did not end, so that nothing that it touched can be trusted."""
        return self._last().is_cut

    def check_thread(self) -> None:
        """Raise PensieveError where somebody is in a call: another thread, or an observer of this one's."""
        self._last().check_ended()

    def check(self) -> None:
        """The same, and make good what was interrupted."""
        self.run(_nothing)

    def run[T](self, change: Callable[[], T]) -> T:
        """What a change returns, which is whole only if it gets to its end, or refuses with a typed error."""
        call = _Call()
        call.body = body = self._body(call, change)
        return next(body)  # kept out of variables: the traceback of an interrupt would keep it alive

    def _body[T](self, call: _Call, change: Callable[[], T]) -> Generator[T]:
        before, doubt = self._last(), call.doubt
        before.check_ended()
        doubt.remains = before.is_cut
        if before.followed_by.setdefault("", call) is not call:
            raise _another_thread()
        self._latest = call
        before.followed_by[""] = _NOBODY  # or whoever keeps that call would keep all that come
        del before, call  # which are nobody's then, when the next call has come
        if doubt.remains:
            self._recover()
        doubt.remains = change is not _nothing
        # No `try` here: it would run when this is thrown away, and swallow an interrupt that comes then.
        yield _outcome(change, doubt)

    def _last(self) -> _Call:
        """The latest call, though an interrupt kept it from being written down."""
        call = self._latest
        while (following := call.followed_by.get("", _NOBODY)) is not _NOBODY:
            call = following
        return call


class _Doubt:
    """Of one call, apart from it, so that its body refers to nothing that refers to the body.

    Attributes:
      remains: where the call has ended without its change being whole, something is half done.
    """

    __slots__ = ("remains",)

    def __init__(self) -> None:
        """None: nothing was begun."""
        self.remains = False


class _Call:
    """One call, of the thread that makes it.

    Attributes:
      body: what runs it; None of what stands before the first one.
      doubt: see `_Doubt`.
      followed_by: at "" the call that came after it; `_NOBODY` as soon as that one is known as the latest.
    """

    __slots__ = ("_thread", "body", "doubt", "followed_by")

    def __init__(self) -> None:
        """Not under way."""
        self._thread = threading.get_ident()
        self.body: Generator[Any] | None = None
        self.doubt = _Doubt()
        self.followed_by: dict[str, _Call] = {}

    @property
    def is_cut(self) -> bool:
        """It ended in the middle of a change, or of making good what had been cut before."""
        return self._state == inspect.GEN_CLOSED and self.doubt.remains

    def check_ended(self) -> None:
        """Raise PensieveError while it is under way."""
        if self._state != inspect.GEN_RUNNING:
            return
        if self._thread == threading.get_ident():
            raise PensieveError("The engine is in the middle of a call: an observer must not call it.")
        raise _another_thread()

    @property
    def _state(self) -> str | None:
        return None if self.body is None else inspect.getgeneratorstate(self.body)


_NOBODY = _Call()


def _outcome[T](change: Callable[[], T], doubt: _Doubt) -> T:
    try:
        return change()
    except PensieveError:  # it refused
        doubt.remains = False
        raise


def _nothing() -> None:
    """Change nothing."""


def _another_thread() -> PensieveError:
    return PensieveError("Another thread is in a call of the engine; one at a time may use it.")
