"""Changes of an engine's state: by one thread at a time, and whole or known not to be.

Owns: which thread is in a call, and whether the latest change came to its end.
Does not know: what is changed, or how what was interrupted is made good. Called by: `Engine`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pensieve_jax.core.errors import PensieveError


class ChangeGuard:
    """Around every change.

    Attributes:
      interrupted: a change began and did not end, so nothing that it touched can be trusted.
    """

    def __init__(self) -> None:
        """Nobody is in a call."""
        self.interrupted = False
        self._thread: int | None = None

    def check_thread(self) -> None:
        """Raise PensieveError where somebody is in a call: another thread, or an observer of this one's."""
        if self._thread is None:
            return
        if self._thread == threading.get_ident():
            raise PensieveError("The engine is in the middle of a call: an observer must not call it.")
        raise PensieveError("Another thread is in a call of the engine; one at a time may use it.")

    @contextmanager
    def change(self) -> Iterator[None]:
        """A change that is whole only if it gets to its end, or refuses with a typed error."""
        self._thread = threading.get_ident()
        self.interrupted = True
        try:
            yield
            self.interrupted = False
        except PensieveError:
            self.interrupted = False
            raise
        finally:
            self._thread = None
