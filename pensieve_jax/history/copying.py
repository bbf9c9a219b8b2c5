"""Copies of a whole history from one place to another, from a file to Postgres or back.

Owns: what is copied, in which order, and the check that the copy equals the source.
Does not know: what rows mean; how a history is opened beyond `opening` and the checks of the two databases.

Each end uses one transaction: the source is read as of one moment, and the target is written completely or
not at all. A file must not be in use by a server. A database may be in use; what is committed during the copy
is not in the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from pensieve_jax.core.errors import ConfigError, HistoryError, HistoryMismatchError, HistoryMissingError
from pensieve_jax.history.codec import TurnRow
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.opening import Location, need_psycopg, open_store, shown
from pensieve_jax.history.postgres_location import is_postgres, parse

_BATCH: Final = 200
_MODULUS: Final = 2**256


class _Table(NamedTuple):
    """Copied columns and rows of a table, in order. Opening the target writes its other `meta` rows."""

    name: str
    columns: tuple[str, ...]
    order: str
    where: str = ""

    @property
    def rows(self) -> str:
        return f"SELECT {', '.join(self.columns)} FROM {self.name} {self.where}"


# Some lists show rows in the order of insertion, so copy these tables in that order. `stored_amounts` is not
# copied: the target's triggers count its rows.
_TABLES: Final = (
    _Table("turns", TurnRow._fields, "rowid"),
    _Table(
        "conversations",
        (
            *("owner", "conversation_id", "head_turn", "version", "metadata"),
            *("created_at_s", "last_active_s", "num_tokens", "num_turns"),
        ),
        "owner, conversation_id",
    ),
    _Table(
        "items",
        ("owner", "conversation_id", "position", "item_id", "item"),
        "owner, conversation_id, position",
    ),
    _Table(
        "responses",
        (
            *("owner", "response_id", "status", "turn_id", "request", "input_items", "output_item_id"),
            *("created_at_s", "expires_at_s", "completed_at_s", "background", "body_sha256", "error", "job"),
            "starts",
        ),
        "rowid",
    ),
    _Table("idempotency", ("owner", "key", "body_sha256", "response_id", "expires_at_s"), "rowid"),
    _Table("released", ("owner", "turn_id"), "owner, turn_id"),
    _Table("meta", ("key", "value"), "key", "WHERE key LIKE 'note:%'"),
)


class Copied(NamedTuple):
    """The contents of a copy: rows by table, and a digest of all of them."""

    num_rows: dict[str, int]
    digest: str


def copy_history(
    source: Location, target: Location, *, progress: Callable[[int, int], None] = lambda done, of: None
) -> Copied:
    """Copy a whole history to a place without one, or with an empty one of the same model.

    `progress` is called with the numbers of copied and of all rows. Raises ConfigError; HistoryError for a
    history that cannot be opened; and HistoryMismatchError for a target that is not empty. If the copy
    differs from the source, HistoryError is raised and nothing is stored.
    """
    if shown(source) == shown(target):
        raise ConfigError("DST", shown(target), "another place than SRC")
    fingerprint = fingerprint_at(source)
    with (
        open_store(source, fingerprint=fingerprint, may_make=False) as source_store,
        open_store(target, fingerprint=fingerprint) as target_store,
    ):

        def change(to: Connection) -> Copied:
            _check_empty(to, target)
            _disable_timeouts(to, target)
            num_reads = itertools.count()

            def copy(connection: Connection) -> Copied:
                if next(num_reads):  # repeated after a lost session; it would write the same rows again
                    raise HistoryError(f"history is {shown(source)!r}, which was lost; nothing was copied.")
                _disable_timeouts(connection, source)
                return _copy(connection, to, target, progress)

            return source_store.read(copy)

        return target_store.change(change)


def _disable_timeouts(connection: Connection, history: Location) -> None:
    """Switch off timeouts: one end waits for the other, perhaps for hours, within its transaction."""
    if is_postgres(history):
        connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        connection.execute("SET LOCAL statement_timeout = 0")


def fingerprint_at(history: Location) -> str:
    """Return the fingerprint of the model that wrote a history; raise HistoryError for a missing history."""
    if is_postgres(history):
        need_psycopg(history)
        from pensieve_jax.history.postgres_store import fingerprint_in  # installed by an extra

        return fingerprint_in(parse(str(history)))
    path = Path(history).resolve()
    if not path.exists():
        raise HistoryMissingError(f"history is {str(path)!r}, which is missing.")
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            row = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
    except sqlite3.Error as error:
        raise HistoryMismatchError(f"history is {str(path)!r}, which is not a history ({error}).") from error
    if row is None:
        raise HistoryMismatchError(f"history is {str(path)!r}, which does not say which model wrote it.")
    return str(row[0])


def _check_empty(connection: Connection, target: Location) -> None:
    for table in _TABLES:
        query = f"SELECT count(*) FROM {table.name} {table.where}"
        (num_rows,) = connection.execute(query).fetchone()
        if num_rows:
            raise HistoryMismatchError(
                f"history is {shown(target)!r}, which holds {num_rows} rows of {table.name} already, but the "
                "target of a copy must be empty; choose another place. It was not changed."
            )


def _copy(
    source: Connection, to: Connection, target: Location, progress: Callable[[int, int], None]
) -> Copied:
    expected = {
        table.name: int(source.execute(f"SELECT count(*) FROM {table.name} {table.where}").fetchone()[0])
        for table in _TABLES
    }
    num_all, num_done, total = sum(expected.values()), 0, 0
    for table in _TABLES:
        placeholders = ", ".join("?" * len(table.columns))
        insert = f"INSERT INTO {table.name}({', '.join(table.columns)}) VALUES ({placeholders})"
        rows = source.stream(f"{table.rows} ORDER BY {table.order}")
        for batch in itertools.batched(rows, _BATCH):
            to.executemany(insert, [tuple(row) for row in batch])
            total += sum(_digest(table.name, row) for row in batch)
            num_done += len(batch)
            progress(num_done, num_all)
    copied = contents(to)
    if copied != Copied(expected, f"{total % _MODULUS:064x}"):
        raise HistoryError(
            f"history is {shown(target)!r}, where the copy differs from the source: {copied.num_rows} "
            f"instead of {expected} rows, or other contents. Nothing was stored."
        )
    return copied


def contents(connection: Connection) -> Copied:
    """Return what a history holds; equal for equal rows, in any database and order."""
    num_rows, total = {}, 0
    for table in _TABLES:
        num_rows[table.name] = 0
        for row in connection.stream(table.rows):
            num_rows[table.name] += 1
            total += _digest(table.name, row)
    return Copied(num_rows, f"{total % _MODULUS:064x}")


def _digest(table: str, row: Sequence[Any]) -> int:
    return int.from_bytes(hashlib.sha256(repr((table, *row)).encode()).digest(), "big")
