"""The history store on SQLite, in a file or in memory.

Owns: the transactions of `HistoryStore`, the lock on the file, and one connection.
Does not know: the statements of a method (`table_store`), the file's schema and damage (`database`), jax.

Durability: the file uses write-ahead logging. With `synchronous="normal"` a committed turn survives
`kill -9`, since its bytes are in the kernel; a power loss may lose the last commits, but never half of one.
With "full" each commit waits for the disk and survives a power loss, too.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from pensieve_jax.core.errors import (
    ConfigError,
    HistoryBusyError,
    HistoryCorruptError,
    HistoryError,
    PensieveError,
)
from pensieve_jax.history import database, table_store, turns_table
from pensieve_jax.history.connection import Connection, SQLiteConnection
from pensieve_jax.history.lock import FileLock
from pensieve_jax.history.store import LOCK_WAIT_S
from pensieve_jax.history.table_store import Commit, TableHistoryStore


class SQLiteHistoryStore(TableHistoryStore):
    """A `HistoryStore` in one SQLite file. See the protocol for the contract of each method.

    Thread-safe: one connection behind one mutex, so a reader waits for a running commit and vice versa.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        fingerprint: str,
        synchronous: database.Synchronous = "normal",
        may_make: bool = True,
    ) -> None:
        """Open or create the history at `path` (None: in memory), read it through once, and lock it.

        Args:
          path: the file; its directory must exist. Next to it are `<name>.lock` and, while open, SQLite's
            `<name>-wal` and `<name>-shm`.
          fingerprint: the writer's identity, from `history_fingerprint`; a file with another one is refused.
          synchronous: "normal" is safe against `kill -9`, "full" against power loss too (one fsync a commit).
          may_make: whether a missing or empty file is a new history; one in memory is always new.

        Raises:
          HistoryMismatchError: written by another model, tokenizer, version or application, or not a
            database; the file is not changed.
          HistoryMissingError: the history is missing, and `may_make` is False.
          HistoryLockedError: already open, in this process or in another.
          HistoryCorruptError: damaged; the file has been moved aside (the message says where), and opening
            the path again starts a new history.
          HistoryError: the path cannot be used.
          ConfigError: `synchronous` or `path` has an invalid value.
        """
        if synchronous not in ("normal", "full"):
            raise ConfigError("synchronous", synchronous, '"normal" or "full"')
        if path is not None and os.fspath(path) in ("", ":memory:"):
            raise ConfigError("history", path, "the path of a file", "give None for a history in memory")
        # Resolve the path, so that two names of one file share one lock.
        self._path = None if path is None else Path(path).resolve()
        if self._path is not None and not may_make:
            database.check_is_there(self._path)  # before the lock, whose side file would stay behind
        self._mutex = threading.RLock()
        self._lock = None if self._path is None else FileLock(self._path)
        opened = False
        try:
            self._connection = database.open_database(self._path, fingerprint, synchronous)
            opened = True
        finally:
            if not opened and self._lock is not None:
                self._lock.discard()

    def close(self) -> None:
        """Checkpoint the log into the file, and release file and lock; a second call does nothing."""
        with self._mutex:
            try:
                self._connection.close()
            finally:
                if self._lock is not None:
                    self._lock.release()

    def _commit(self, commits: Sequence[Commit], in_use: Collection[str]) -> Mapping[int, PensieveError]:
        def change(connection: Connection) -> dict[int, PensieveError]:
            refused = table_store.append_all(connection, commits)
            if table_store.moves_heads(commits):
                turns_table.collect_released(connection, in_use)
            return refused

        return self._transact(change, lock_wait_s=0.0)

    def _run[T](self, work: Callable[[SQLiteConnection], T]) -> T:
        """Run `work` alone on the connection; turn errors of SQLite into errors of the history."""
        with self._mutex:
            try:
                if self._connection.in_transaction:  # an interrupt came during the rollback after another one
                    self._connection.execute("ROLLBACK")
                return work(self._connection)
            except sqlite3.Error as error:
                if database.is_damage(error):
                    raise self._damaged(str(error)) from error
                if database.is_locked(error):
                    raise HistoryBusyError(
                        f"history is {str(self._path)!r}, which another program has locked for writing; "
                        "nothing of this call was stored. Close that program, or try again."
                    ) from error
                raise HistoryError(
                    f"history is {str(self._path)!r}, which could not be read or written ({error}); nothing "
                    "of this call was stored. Check that the store is open and the disk has space, then try "
                    "again."
                ) from error

    def _transact[T](self, change: Callable[[SQLiteConnection], T], lock_wait_s: float | None = None) -> T:
        """Run `change` in a transaction; roll back if it raises anything, KeyboardInterrupt included.

        It waits `lock_wait_s` seconds for a lock of another program; None means `self.lock_wait_s`.
        """
        if self.is_damaged:  # SQLite would still write other pages of the file
            raise self._damaged("an earlier call found this")
        wait_s = self.lock_wait_s if lock_wait_s is None else lock_wait_s

        def transaction(connection: SQLiteConnection) -> T:
            try:
                _begin(connection, wait_s)
                result = change(connection)
                connection.execute("COMMIT")
                return result
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

        return self._run(transaction)

    def _damaged(self, reason: str) -> HistoryCorruptError:
        """Record damage and return the error."""
        self.is_damaged = True
        return HistoryCorruptError(
            f"history is {str(self._path)!r}, which was damaged while it was open ({reason}); it "
            "stores nothing more. Close it; opening it again moves the damaged file aside."
        )


def _begin(connection: SQLiteConnection, lock_wait_s: float) -> None:
    """Begin a transaction with the lock for writing; the wait for it is that of this statement only."""
    if lock_wait_s == LOCK_WAIT_S:  # the connection's own
        connection.execute("BEGIN IMMEDIATE")
        return
    connection.execute(f"PRAGMA busy_timeout = {round(1e3 * lock_wait_s)}")
    try:
        connection.execute("BEGIN IMMEDIATE")
    finally:
        connection.execute(f"PRAGMA busy_timeout = {round(1e3 * LOCK_WAIT_S)}")
