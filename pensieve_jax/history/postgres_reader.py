"""Read-only sessions with Postgres.

Owns: how a session is opened and used, and one retry after a session was lost.
Does not know: the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import psycopg

from pensieve_jax.core.errors import HistoryError
from pensieve_jax.history import postgres_schema
from pensieve_jax.history.postgres_connection import PostgresConnection, as_history_error
from pensieve_jax.history.postgres_location import PostgresLocation
from pensieve_jax.history.read_connections import ReadConnections


class PostgresReadConnections(ReadConnections[PostgresConnection]):
    """Sessions of one history; a restart of Postgres loses all of them at once."""

    _NUM_TRIES: ClassVar[int] = 2

    def __init__(self, location: PostgresLocation) -> None:
        """Open the first session; raise HistoryError if the database cannot be reached."""
        self._location = location
        super().__init__(location.shown)

    def _read[T](self, connection: PostgresConnection, work: Callable[[PostgresConnection], T]) -> T:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            return work(connection)
        finally:
            if connection.is_usable:
                connection.execute("ROLLBACK")

    def _opened(self) -> PostgresConnection:
        return PostgresConnection(self._location)

    def _close(self, connection: PostgresConnection) -> None:
        connection.close()

    def _failures(self) -> tuple[type[Exception], ...]:
        return (psycopg.Error,)

    def _as_history_error(self, error: Exception) -> HistoryError:
        assert isinstance(error, psycopg.Error)
        return as_history_error(error, self._location)


def read_database(location: PostgresLocation, fingerprint: str) -> PostgresReadConnections:
    """Return sessions of a history that a writer has created; raise HistoryError if it is unusable."""
    connections = PostgresReadConnections(location)
    checked = False
    try:
        connections.run(lambda connection: postgres_schema.check(connection, location, fingerprint))
        checked = True
    finally:
        if not checked:
            connections.close()
    return connections
