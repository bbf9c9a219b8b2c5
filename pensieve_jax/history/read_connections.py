"""Connections to a history that only read.

Owns: that whoever reads has a connection alone, without waiting for another reader; how one to a file is
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

from pensieve_jax.core.errors import HistoryError, HistoryMismatchError
from pensieve_jax.history import schema
from pensieve_jax.history.connection import Connection, SQLiteConnection

BUSY_TIMEOUT_S: Final = 1.0  # only a start or an end of the writer can make a reader wait
MAX_IDLE: Final = 8
"""Kept for later; there are as many as threads that read at a time."""


class ReadConnections[C](ABC):
    """Of one history; safe to call from several threads."""

    _NUM_TRIES: ClassVar[int] = 1
    """How often what cannot be read is read, with another connection each time."""

    def __init__(self, shown: str) -> None:
        """`shown` is how messages call the history. Raises HistoryError where it cannot be opened."""
        self._shown = shown
        self._mutex = threading.Lock()
        self._is_closed = False
        self._idle: list[C] = [self._opened()]

    def run[T](self, work: Callable[[C], T]) -> T:
        """What `work` returns, which reads one state of the history; raises HistoryError."""
        for _ in range(self._NUM_TRIES - 1):
            try:
                return self._run(work)
            except HistoryError:
                self._drop_idle()  # what one has lost, the others have lost as well
        return self._run(work)

    def close(self) -> None:
        """Close those that nobody uses, and the others when they are given back."""
        with self._mutex:
            self._is_closed = True
        self._drop_idle()

    def _run[T](self, work: Callable[[C], T]) -> T:
        connection = self._taken()
        has_failed = True
        try:
            result = self._read(connection, work)
            has_failed = False
            return result
        except self._failures() as error:
            raise self._as_history_error(error) from error
        except HistoryError:
            raise
        except Exception:
            has_failed = False  # what is not found is no failure of the connection
            raise
        finally:
            self._give_back(connection, has_failed)

    def _drop_idle(self) -> None:
        with self._mutex:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._close(connection)

    def _taken(self) -> C:
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
        """A new connection; raises HistoryError."""

    @abstractmethod
    def _close(self, connection: C) -> None: ...

    @abstractmethod
    def _read[T](self, connection: C, work: Callable[[C], T]) -> T:
        """What `work` returns, in a transaction of its own."""

    @abstractmethod
    def _failures(self) -> tuple[type[Exception], ...]:
        """What the database raises."""

    @abstractmethod
    def _as_history_error(self, error: Exception) -> HistoryError:
        """What is told of that."""


class SQLiteReadConnections(ReadConnections[SQLiteConnection]):
    """Of one file. It is in write-ahead mode: nobody waits for the writer."""

    def __init__(self, path: Path) -> None:
        """Of a file that a writer has made; raises HistoryError where it cannot be opened."""
        self._path = path
        super().__init__(str(path))

    def _read[T](self, connection: SQLiteConnection, work: Callable[[SQLiteConnection], T]) -> T:
        connection.execute("BEGIN")
        try:
            return work(connection)
        finally:
            if connection.in_transaction:  # where it cannot read, SQLite has rolled back by itself
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
        return HistoryError(f"history is {self._shown!r}, which could not be read ({error}).")


def read_file(path: Path, fingerprint: str) -> SQLiteReadConnections:
    """Connections to a history that a writer has made.

    Raises HistoryError if it cannot be opened, HistoryMismatchError if it is not a history of this release
    and this model.
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
        raise HistoryMismatchError(f"history is {shown!r}, which is no history.")
    if version != schema.SCHEMA_VERSION:
        raise HistoryMismatchError(
            f"history is {shown!r}, which has schema version {version}, but this release reads version "
            f"{schema.SCHEMA_VERSION}; use the release that wrote it."
        )
    (written_by,) = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
    if written_by != fingerprint:
        raise HistoryMismatchError(
            f"history is {shown!r}, which was written by {written_by!r}, not by {fingerprint!r}."
        )
