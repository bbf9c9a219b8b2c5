"""Claims of servers that share a history in Postgres: locks of a session, which end with the session.

Owns: the session, and the number that stands for a name.
Does not know: what is claimed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection

import psycopg

from pensieve_jax.core.errors import HistoryError
from pensieve_jax.history.postgres_connection import PostgresConnection, as_history_error
from pensieve_jax.history.postgres_location import PostgresLocation


class PostgresClaims:
    """Claims of one server. Thread-safe; a thread that waits for Postgres blocks the others.

    The session begins with the first claim. The next `take` replaces a lost session and claims the held names
    again, unless another server was faster.
    """

    are_shared = True

    def __init__(self, location: PostgresLocation) -> None:
        """Prepare the claims without connecting."""
        self._location = location
        self._asking = threading.Lock()
        self._is_closed = False
        self._session: PostgresConnection | None = None
        self._held: frozenset[str] = frozenset()  # replaced as a whole, so that `holds` needs no lock
        self._given_up: set[str] = set()

    def take(self, name: str) -> bool:
        """Claim `name`, and return whether this server holds it; raise HistoryError if Postgres fails."""
        with self._asking:
            try:
                try:
                    self._take(name)
                except psycopg.Error:
                    self._drop()  # the session may have been lost long ago
                    self._take(name)
            except psycopg.Error as error:
                self._drop()
                raise as_history_error(error, self._location) from error
            finally:
                if self._is_closed:
                    self._drop()
            return name in self._held

    def holds(self, name: str) -> bool:
        """Return whether `name` was claimed and not given up, without asking Postgres."""
        return name in self._held and name not in self._given_up

    def give_up(self, name: str) -> None:
        """Leave `name` to other servers with the next `take` at the latest."""
        self._given_up.add(name)

    def keep_only(self, names: Collection[str]) -> None:
        """Give up every claim except those of `names`, with the next `take` at the latest."""
        self._given_up |= self._held.difference(names)

    def close(self) -> None:
        """Give up every claim without waiting: a `take` in progress ends the session itself."""
        self._is_closed, self._held = True, frozenset()
        if self._asking.acquire(blocking=False):  # otherwise the running `take` ends the session
            try:
                self._drop()
            finally:
                self._asking.release()

    def _take(self, name: str) -> None:
        if self._is_closed:
            raise HistoryError(f"history is {self._location.shown!r}, which is closed.")
        session = self._connected()
        self._let_go()
        if name in self._held:
            session.execute("SELECT 1")  # checks the session: locks end with it
        elif self._lock(name):
            self._held |= {name}

    def _connected(self) -> PostgresConnection:
        if self._session is not None and not self._session.is_usable:
            self._drop()
        if self._session is None:
            self._session = PostgresConnection(self._location)
            self._held = frozenset(name for name in self._held - self._given_up if self._lock(name))
            self._given_up.clear()
        return self._session

    def _let_go(self) -> None:
        while self._given_up:
            name = self._given_up.pop()
            if name in self._held:
                self._held -= {name}
                self._ask("SELECT pg_advisory_unlock(?)", name)

    def _lock(self, name: str) -> bool:
        return self._ask("SELECT pg_try_advisory_lock(?)", name)

    def _ask(self, query: str, name: str) -> bool:
        assert self._session is not None
        digest = hashlib.sha256(f"{self._location.namespace}/{name}".encode()).digest()
        number = int.from_bytes(digest[:8], signed=True)
        row = self._session.execute(query, (number,)).fetchone()
        assert row is not None
        return bool(row[0])

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
