"""Read-only connections: the error of a failure, and what happens to the connection that failed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pensieve_jax.core.errors import HistoryError, UnknownRecordError
from pensieve_jax.history.read_connections import MAX_IDLE, SQLiteReadConnections


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


def is_open(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return False
    return True


def test_idle_connections_are_closed_at_once_and_busy_ones_when_they_are_returned(
    connections: SQLiteReadConnections,
) -> None:
    def close(busy: sqlite3.Connection) -> sqlite3.Connection:
        idle = used(connections)
        assert idle is not busy and is_open(idle)
        connections.close()
        assert not is_open(idle) and is_open(busy)
        return busy

    assert not is_open(connections.run(close))
    with pytest.raises(HistoryError, match="closed"):
        used(connections)


def test_the_number_of_idle_connections_is_limited(connections: SQLiteReadConnections) -> None:
    opened: list[sqlite3.Connection] = []

    def open_more(connection: sqlite3.Connection) -> None:
        opened.append(connection)
        if len(opened) < MAX_IDLE + 2:
            connections.run(open_more)

    connections.run(open_more)
    assert len(set(opened)) == MAX_IDLE + 2 and sum(map(is_open, opened)) == MAX_IDLE


@pytest.mark.parametrize(("num_failures", "num_calls"), [(0, 1), (1, 2), (2, 2)])
def test_a_read_may_be_tried_again_with_a_new_connection(
    connections: SQLiteReadConnections, monkeypatch: pytest.MonkeyPatch, num_failures: int, num_calls: int
) -> None:
    monkeypatch.setattr(SQLiteReadConnections, "_NUM_TRIES", 2)
    found: list[sqlite3.Connection] = []

    def read(connection: sqlite3.Connection) -> str:
        found.append(connection)
        if len(found) <= num_failures:
            raise sqlite3.OperationalError("disk I/O error")
        return "read"

    idle = connections.run(lambda _: used(connections))
    if num_failures < 2:
        assert connections.run(read) == "read"
    else:
        with pytest.raises(HistoryError, match="disk I/O error"):
            connections.run(read)
    assert len(found) == len(set(found)) == num_calls
    assert is_open(idle) == (not num_failures), "the others are closed too"
