"""Who of several servers does what only one of them should.

Owns: what a claim promises, and those of a history that one server has alone.
Does not know: what is claimed, or Postgres (`postgres_claims`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class Claims(Protocol):
    """Names that a server has for itself, for as long as it lives and can be reached.

    A server that is cut off from the history loses its claims without knowing: what is claimed must come to
    no harm if two do it.
    """

    @property
    def are_shared(self) -> bool:
        """Whether somebody else could hold one."""
        ...

    def take(self, name: str) -> bool:
        """Whether a name is this server's now; raises HistoryError where the history is away."""
        ...

    def holds(self, name: str) -> bool:
        """Whether it was taken and not given up; does not ask."""
        ...

    def give_up(self, name: str) -> None:
        """Leave it to others, with the next `take` at the latest."""
        ...

    def keep_only(self, names: Collection[str]) -> None:
        """Give up all others."""
        ...

    def close(self) -> None:
        """Give up every claim; this server holds nothing from now on."""
        ...


class OwnClaims:
    """Of a file: nobody else can open it."""

    are_shared = False

    def take(self, name: str) -> bool:
        return True

    def holds(self, name: str) -> bool:
        return True

    def give_up(self, name: str) -> None:
        """Nobody waits for it."""

    def keep_only(self, names: Collection[str]) -> None:
        """Nobody waits for the others."""

    def close(self) -> None: ...
