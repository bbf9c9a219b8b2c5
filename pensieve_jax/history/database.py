"""The SQLite file of a history: created, accepted, refused, or moved aside if it is damaged.

Owns: which file is accepted, what counts as damaged, and where damaged files are moved to.
Does not know: what the tables are (`schema`), or locks; the caller holds the lock on the path.

Files of other applications are never changed, and nothing is ever overwritten. A damaged history is renamed,
with SQLite's own side files, to the first free name `<name>.corrupt-<n>`, where
`sqlite3 <name>.corrupt-<n> .recover` finds all of it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final, Literal, NoReturn

from pensieve_jax.core.errors import (
    HistoryCorruptError,
    HistoryError,
    HistoryLockedError,
    HistoryMismatchError,
    HistoryMissingError,
)
from pensieve_jax.history import schema
from pensieve_jax.history.connection import SQLiteConnection
from pensieve_jax.history.store import LOCK_WAIT_S

type Synchronous = Literal["normal", "full"]

_MAGIC: Final = b"SQLite format 3\0"  # the first bytes of every non-empty database
_APPLICATION_ID_BYTES: Final = slice(68, 72)  # big-endian
_SIDE_FILE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")


class _DamageError(Exception):
    """The reason why a history file is damaged."""


def open_database(path: Path | None, fingerprint: str, synchronous: Synchronous) -> SQLiteConnection:
    """Return a connection in autocommit mode to a checked history, created if missing; None is in memory.

    Reads the whole file once (`PRAGMA quick_check`). Raises HistoryMismatchError for a history of another
    fingerprint or version and for another application's file; they are not changed. Raises
    HistoryCorruptError after moving a damaged file aside, HistoryLockedError if another program keeps the
    file locked, and HistoryError if it cannot be opened at all.
    """
    if path is not None:
        _check_is_database(path)
    if path is not None and _size_bytes(path) == 0 and _size_bytes(_side_file(path, "-wal")) > 0:
        # SQLite would delete the log of a missing database, and with it the last commits.
        _set_aside(path, "the file is missing or empty, but its write-ahead log is not")
    try:
        if path is not None:
            _make_private(path)
        connection = _connect(path)
    except (OSError, sqlite3.Error) as error:
        raise _cannot_open(path, error) from error
    try:
        _accept(connection, path, fingerprint, synchronous)
        return connection
    except _DamageError as error:
        _set_aside(path, str(error))
    except sqlite3.Error as error:
        if is_damage(error):
            _set_aside(path, str(error))
        raise _cannot_open(path, error) from error


def check_is_there(path: Path) -> None:
    """Raise HistoryMissingError if a new history would be created; change nothing."""
    if _size_bytes(path) == 0:
        raise HistoryMissingError(
            f"history is {str(path)!r}, which is missing or empty, but existed before; find it, or put a "
            "backup in its place. Nothing was created there."
        )


def is_locked(error: sqlite3.Error) -> bool:
    """Return whether another program holds a lock that the statement needs."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether SQLite reports that the file itself is broken, not just busy, full or unreadable."""
    # The low byte is the primary error code; the higher ones distinguish variants of it.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _make_private(path: Path) -> None:
    """Create a missing file that only its owner can read; SQLite's own side files inherit its mode."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _connect(path: Path | None) -> SQLiteConnection:
    # isolation_level None switches off Python's own transactions: a commit is one explicit BEGIN ... COMMIT.
    return sqlite3.connect(
        ":memory:" if path is None else path,
        isolation_level=None,
        check_same_thread=False,
        timeout=LOCK_WAIT_S,
        factory=SQLiteConnection,
    )


def _accept(
    connection: sqlite3.Connection, path: Path | None, fingerprint: str, synchronous: Synchronous
) -> None:
    """Check the file, create missing tables, and set up the connection; close it if this raises."""
    accepted = is_ours = False
    try:
        # Inspecting a file must not change it: no checkpoint if it is damaged or another application's.
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)
        if _is_empty(connection):
            _create(connection, fingerprint)
        _check(connection, path, fingerprint)
        is_ours = True
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, False)
        connection.execute(schema.RESPONSES_BY_TREE)
        connection.execute(schema.NAMED_BY_ACTIVITY)
        connection.execute(schema.KEPT_BY_ACTIVITY)
        if _pragma(connection, "user_version") != schema.SCHEMA_VERSION:
            _upgrade(connection)
        if path is not None:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        accepted = True
    finally:
        if not accepted and is_ours:
            connection.close()
        elif not accepted:
            # SQLite has created a log next to a file that had none. The log is empty, so a checkpoint writes
            # nothing, and SQLite removes the log with it unless another program has started to use it.
            has_log = path is not None and _size_bytes(_side_file(path, "-wal")) > 0
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, has_log)
            connection.close()


def _is_empty(connection: sqlite3.Connection) -> bool:
    (num_objects,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return (
        num_objects == 0 and _pragma(connection, "application_id") == _pragma(connection, "user_version") == 0
    )


def _create(connection: sqlite3.Connection, fingerprint: str) -> None:
    """Create the tables in one transaction, so that a kill leaves an empty file or a complete one."""
    # While the journal is still a rollback journal: then the main file never lacks data that only a log has.
    connection.execute("BEGIN IMMEDIATE")
    schema.create_tables(connection, fingerprint=fingerprint)
    connection.execute("COMMIT")


def _upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade an older history in one transaction, so that a kill leaves it as it was or complete."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        schema.upgrade(connection)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _check(connection: sqlite3.Connection, path: Path | None, fingerprint: str) -> None:
    """Raise the errors of `open_database` unless the file is a sound history of this version and model."""
    is_ours = _pragma(connection, "application_id") == schema.APPLICATION_ID
    version = _pragma(connection, "user_version")
    if not is_ours:
        raise _foreign(path)
    findings = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if findings != ["ok"]:
        raise _DamageError(f"quick_check reports: {' '.join(findings[0].split())}")
    if version not in (*schema.OLDER_VERSIONS, schema.SCHEMA_VERSION):
        raise HistoryMismatchError(
            f"history is {str(path)!r}, which has schema version {version}, but this release reads and "
            f"writes version {schema.SCHEMA_VERSION}; use the release that wrote it or choose another path. "
            "The file was not changed."
        )
    for table, columns in schema.columns_in(version).items():
        found = schema.columns_of(connection, table)
        if found != columns:
            raise _DamageError(f"table {table} has the columns {sorted(found)} instead of {sorted(columns)}")
    written_by = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
    if written_by is None:
        raise _DamageError("it does not say which model wrote it")
    if written_by[0] != fingerprint:
        raise HistoryMismatchError(
            f"history is {str(path)!r}, which was written by {written_by[0]!r}, but the model in use is "
            f"{fingerprint!r}; load the model and tokenizer that wrote it or choose another path. The file "
            "was not changed."
        )


def _set_aside(path: Path | None, reason: str) -> NoReturn:
    """Rename a damaged history and its side files to a free name and raise HistoryCorruptError.

    A damaged database of another application is not renamed: HistoryMismatchError.
    """
    if path is None:
        raise HistoryCorruptError(f"The history in memory is damaged: {reason}.")
    application_id = _head(path)[_APPLICATION_ID_BYTES]
    if len(application_id) == 4 and int.from_bytes(application_id, "big") != schema.APPLICATION_ID:
        raise _foreign(path)
    number = 1
    while any(_side_file(_corrupt_name(path, number), suffix).exists() for suffix in _SIDE_FILE_SUFFIXES):
        number += 1
    target = _corrupt_name(path, number)
    # The main file first: a kill in between leaves a log without a database, which counts as damage again.
    for suffix in _SIDE_FILE_SUFFIXES:
        source = _side_file(path, suffix)
        if source.exists():
            source.rename(_side_file(target, suffix))
    raise HistoryCorruptError(
        f"history is {str(path)!r}, which is damaged ({reason}); it was moved to {str(target)!r} unchanged. "
        "Open again to start a new history, or restore a backup."
    )


def _check_is_database(path: Path) -> None:
    """Raise HistoryMismatchError for a file that SQLite did not write; to SQLite an empty file is new."""
    head = _head(path)
    # A kill during creation may leave the first page unwritten, with a journal to roll back with.
    is_unfinished = not any(head) and _size_bytes(_side_file(path, "-journal")) > 0
    if head and not head.startswith(_MAGIC) and not is_unfinished:
        raise HistoryMismatchError(
            f"history is {str(path)!r}, which is not a history file; give another path. The file was not "
            "changed."
        )


def _head(path: Path) -> bytes:
    """Return the beginning of the file, b"" if it does not exist; raise HistoryError."""
    try:
        with path.open("rb") as file:
            return file.read(_APPLICATION_ID_BYTES.stop)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise HistoryError(
            f"history is {str(path)!r}, which cannot be read ({error.strerror}); choose a file that this "
            "user may read and write."
        ) from error


def _foreign(path: Path | None) -> HistoryMismatchError:
    return HistoryMismatchError(
        f"history is {str(path)!r}, which is a database of another application, but must be a history or a "
        "new file; choose another path. The file was not changed."
    )


def _corrupt_name(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.corrupt-{number}")


def _side_file(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def _cannot_open(path: Path | None, error: OSError | sqlite3.Error) -> HistoryError:
    if isinstance(error, sqlite3.Error) and is_locked(error):
        return HistoryLockedError(
            f"history is {str(path)!r}, which another program has locked; close that program or choose "
            "another path."
        )
    return HistoryError(
        f"history is {str(path)!r}, which cannot be opened ({error}); choose a file in an existing directory "
        "that this user may write to."
    )
