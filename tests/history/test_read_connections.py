"""Read-only connections: the error of a failure, and what happens to the connection that failed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pensieve_jax.core.errors import HistoryError, UnknownRecordError
from pensieve_jax.history.read_connections import SQLiteReadConnections


@pytest.fixture
def connections(tmp_path: Path):
    path = tmp_path / "history.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE facts(fact)")
    connection.close()
    connections = SQLiteReadConnections(path)
    yield connections
    connections.close()


def used(connections: SQLiteReadConnections) -> sqlite3.Connection:
    """Return the connection that the next reader gets if no other reads."""
    return connections.run(lambda connection: connection)


def test_the_real_cause_is_raised(connections: SQLiteReadConnections) -> None:
    """SQLite rolls back by itself if it cannot read or finds damage."""

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    first = used(connections)
    with pytest.raises(HistoryError, match="disk I/O error"):
        connections.run(fail)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        first.execute("SELECT 1")
    assert used(connections).execute("SELECT count(*) FROM facts").fetchone() == (0,)


def test_a_lookup_error_is_not_a_failure_of_the_connection(connections: SQLiteReadConnections) -> None:
    def miss(connection: sqlite3.Connection) -> None:
        raise UnknownRecordError("response", "r")

    first = used(connections)
    with pytest.raises(UnknownRecordError):
        connections.run(miss)
    assert used(connections) is first and not first.in_transaction


def test_a_failed_connection_is_not_reused(connections: SQLiteReadConnections) -> None:
    first = used(connections)
    with pytest.raises(HistoryError, match="no such table"):
        connections.run(lambda connection: connection.execute("SELECT * FROM missing"))
    assert used(connections) is not first
