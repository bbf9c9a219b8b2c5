"""Read-only connections to a history.

Owns: that every reader has a connection to itself without waiting for others, how a connection to a file is
opened, and which files are refused.
Does not know: tables, or Postgres (`postgres_reader`).
"""

from __future__ import annotations

import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote

from pensieve_jax.core.errors import HistoryCorruptError, HistoryError, HistoryMismatchError
from pensieve_jax.history import schema
from pensieve_jax.history.connection import Connection, SQLiteConnection
from pensieve_jax.history.database import is_damage
from pensieve_jax.history.failure_log import FailureLog

BUSY_TIMEOUT_S: Final = 1.0  # a reader only waits while the writer opens or closes the file
MAX_IDLE: Final = 8
"""Maximum of idle connections kept for reuse; there are as many connections as threads read at a time."""


class ReadConnections[C](ABC):
    """Read-only connections to one history. Thread-safe.

    Attributes:
      is_damaged: whether a read has found the history itself damaged.
    """

    _NUM_TRIES: ClassVar[int] = 1
    """How often a failing read is tried, each time with another connection."""

    def __init__(self, shown: str) -> None:
        """Open the first connection, or raise HistoryError; `shown` names the history in messages."""
        self._shown = shown
        self._mutex = threading.Lock()
        self._is_closed = False
        self.is_damaged = False
        self._failure_log = FailureLog()
        self._idle: list[C] = [self._opened()]

    def run[T](self, work: Callable[[C], T]) -> T:
        """Run `work` on one consistent state of the history and return its result; raise HistoryError."""
        for _ in range(self._NUM_TRIES - 1):
            try:
                return self._run(work)
            except HistoryError:
                self._drop_idle()  # if one connection is lost, so are the others
        return self._run(work)

    def close(self) -> None:
        """Close the idle connections now, and the others when they are returned."""
        with self._mutex:
            self._is_closed = True
        self._drop_idle()

    def _run[T](self, work: Callable[[C], T]) -> T:
        connection = self._take()
        has_failed = True
        try:
            result = self._read(connection, work)
            has_failed = False
            return result
        except self._failures() as error:
            history_error = self._as_history_error(error)
            self._failure_log.note(history_error)
            raise history_error from error
        except HistoryError:
            raise
        except Exception:
            has_failed = False  # for example a record that was not found: the connection is good
            raise
        finally:
            self._give_back(connection, has_failed)

    def _drop_idle(self) -> None:
        with self._mutex:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._close(connection)

    def _take(self) -> C:
        with self._mutex:
            if self._is_closed:
                raise HistoryError(f"history is {self._shown!r}, whose reader is closed.")
            if self._idle:
                return self._idle.pop()
        return self._opened()

    def _give_back(self, connection: C, has_failed: bool) -> None:
        with self._mutex:
            is_kept = not has_failed and not self._is_closed and len(self._idle) < MAX_IDLE
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            self._close(connection)

    @abstractmethod
    def _opened(self) -> C:
        """Open a new connection; raise HistoryError."""

    @abstractmethod
    def _close(self, connection: C) -> None: ...

    @abstractmethod
    def _read[T](self, connection: C, work: Callable[[C], T]) -> T:
        """Run `work` in a transaction of its own and return its result."""

    @abstractmethod
    def _failures(self) -> tuple[type[Exception], ...]:
        """Return the exception classes of the database."""

    @abstractmethod
    def _as_history_error(self, error: Exception) -> HistoryError:
        """Return the error to report for an exception of the database."""


class SQLiteReadConnections(ReadConnections[SQLiteConnection]):
    """Connections to one file in write-ahead mode, so that readers do not wait for the writer."""

    def __init__(self, path: Path) -> None:
        """Open a file that a writer has created; raise HistoryError if it cannot be opened."""
        self._path = path
        super().__init__(str(path))

    def _read[T](self, connection: SQLiteConnection, work: Callable[[SQLiteConnection], T]) -> T:
        connection.execute("BEGIN")
        try:
            return work(connection)
        finally:
            if connection.in_transaction:  # if it cannot read, SQLite has rolled back by itself
                connection.execute("ROLLBACK")

    def _opened(self) -> SQLiteConnection:
        try:
            return sqlite3.connect(
                f"file:{quote(str(self._path))}?mode=ro",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=BUSY_TIMEOUT_S,
                factory=SQLiteConnection,
            )
        except sqlite3.Error as error:
            raise HistoryError(f"history is {self._shown!r}, which cannot be opened ({error}).") from error

    def _close(self, connection: SQLiteConnection) -> None:
        connection.close()

    def _failures(self) -> tuple[type[Exception], ...]:
        return (sqlite3.Error,)

    def _as_history_error(self, error: Exception) -> HistoryError:
        if isinstance(error, sqlite3.Error) and is_damage(error):
            self.is_damaged = True
            return HistoryCorruptError(
                f"history is {self._shown!r}, which was damaged while it was open ({error}); it "
                "stores nothing more. Close it; opening it again moves the damaged file aside."
            )
        return HistoryError(f"history is {self._shown!r}, which could not be read ({error}).")


def read_file(path: Path, fingerprint: str) -> SQLiteReadConnections:
    """Open connections to a history that a writer has created.

    Raises HistoryError if it cannot be opened, and HistoryMismatchError if it is not a history of this
    release and this model.
    """
    connections = SQLiteReadConnections(path)
    checked = False
    try:
        connections.run(lambda connection: _check(connection, str(path), fingerprint))
        checked = True
    finally:
        if not checked:
            connections.close()
    return connections


def _check(connection: Connection, shown: str, fingerprint: str) -> None:
    marks: tuple[Any, ...] = tuple(
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    application_id, version = marks
    if application_id != schema.APPLICATION_ID:
        raise HistoryMismatchError(f"history is {shown!r}, which is not a history.")
    if version != schema.SCHEMA_VERSION:
        raise HistoryMismatchError(
            f"history is {shown!r}, which has schema version {version}, but this release reads version "
            f"{schema.SCHEMA_VERSION}; {schema.how_to_read(version)}."
        )
    (written_by,) = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
    if written_by != fingerprint:
        raise HistoryMismatchError(
            f"history is {shown!r}, which was written by {written_by!r}, not by {fingerprint!r}."
        )
