"""Connections to a history that only read.

Owns: how one is opened, and that whoever reads has one alone, without waiting for another reader.
Does not know: tables.
Called by: `reader`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

from pensieve_jax.core.errors import HistoryError

BUSY_TIMEOUT_S: Final = 1.0  # only a start or an end of the writer can make a reader wait
MAX_IDLE: Final = 8
"""Kept for later; there are as many as threads that read at a time."""


class ReadConnections:
    """Of one file; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        """Of a file that a writer has made; raises HistoryError where it cannot be opened."""
        self._path = path
        self._mutex = threading.Lock()
        self._is_closed = False
        self._idle = [self._opened()]

    def run[T](self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns, which reads one state of the file; raises HistoryError."""
        connection = self._taken()
        has_failed = False
        try:
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                if connection.in_transaction:  # where it cannot read, SQLite has rolled back by itself
                    connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            has_failed = True
            raise HistoryError(
                f"history is {str(self._path)!r}, which could not be read ({error})."
            ) from error
        finally:
            self._give_back(connection, has_failed)

    def close(self) -> None:
        """Close those that nobody uses, and the others when they are given back."""
        with self._mutex:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _taken(self) -> sqlite3.Connection:
        with self._mutex:
            if self._is_closed:
                raise HistoryError(f"history is {str(self._path)!r}, whose reader is closed.")
            if self._idle:
                return self._idle.pop()
        return self._opened()

    def _give_back(self, connection: sqlite3.Connection, has_failed: bool) -> None:
        with self._mutex:
            is_kept = not has_failed and not self._is_closed and len(self._idle) < MAX_IDLE
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def _opened(self) -> sqlite3.Connection:
        try:
            return sqlite3.connect(
                f"file:{quote(str(self._path))}?mode=ro",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=BUSY_TIMEOUT_S,
            )
        except sqlite3.Error as error:
            raise HistoryError(
                f"history is {str(self._path)!r}, which cannot be opened ({error})."
            ) from error
