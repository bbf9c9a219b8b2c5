"""Claims: how servers of one history agree on which of them does a job that only one should do.

Owns: the contract of a claim, and the claims of a history that only one server can open.
Does not know: what is claimed, or Postgres (`postgres_claims`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class Claims(Protocol):
    """Names that a server holds exclusively while it runs and can reach the history.

    A server that loses its connection to the history loses its claims without notice, so a claimed job must
    be harmless if two servers do it.
    """

    @property
    def are_shared(self) -> bool:
        """Whether another server could hold a claim."""
        ...

    def take(self, name: str) -> bool:
        """Claim a name; return whether this server holds it. Raises HistoryError if it cannot be asked."""
        ...

    def holds(self, name: str) -> bool:
        """Return whether the name was claimed and not given up, without asking the database."""
        ...

    def give_up(self, name: str) -> None:
        """Release a name, with the next `take` at the latest."""
        ...

    def keep_only(self, names: Collection[str]) -> None:
        """Release all names but these."""
        ...

    def close(self) -> None:
        """Release every claim; this server holds none from now on."""
        ...


class OwnClaims:
    """Claims of a history file, which no other server can open."""

    are_shared = False

    def take(self, name: str) -> bool:
        return True

    def holds(self, name: str) -> bool:
        return True

    def give_up(self, name: str) -> None:
        """Do nothing, since no other server waits for the name."""

    def keep_only(self, names: Collection[str]) -> None:
        """Do nothing, since no other server waits for names."""

    def close(self) -> None: ...
