"""What a history says that each owner stores, and a recount of all its rows.

Owns: the recount, which shares no code with the triggers that keep the amounts.
Does not know: servers.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any, Final, NamedTuple

from pensieve_jax.history.connection import Connection, SQLiteConnection
from pensieve_jax.history.opening import is_postgres, parse
from pensieve_jax.history.stored_amounts import StoredAmounts

_SIZED: Final = {
    "turns": ("prompt_ids", "output_ids", "messages", "output_text", "usage"),
    "conversations": ("conversation_id", "metadata"),
    "items": ("item_id", "item"),
    "responses": ("request", "input_items", "error", "job"),
    "idempotency": ("key",),
}
_ROW_BYTES: Final = 256


class BothAmounts(NamedTuple):
    """Amounts by owner: as the history counts them, and as its rows are. Owners without rows are left out."""

    counted: dict[str, StoredAmounts]
    recounted: dict[str, StoredAmounts]


def read_amounts(history: str) -> BothAmounts:
    """Read a history, a file or a URL of Postgres, in one snapshot; it may be in use."""
    connection: Any
    if is_postgres(history):
        from pensieve_jax.history.postgres_connection import PostgresConnection  # of an extra

        connection, begin = PostgresConnection(parse(history)), "BEGIN ISOLATION LEVEL REPEATABLE READ"
    else:
        connection = sqlite3.connect(
            f"file:{history}?mode=ro", uri=True, isolation_level=None, factory=SQLiteConnection
        )
        begin = "BEGIN"
    with contextlib.closing(connection):
        connection.execute(begin)
        return BothAmounts(counted(connection), recounted(connection, escapes=is_postgres(history)))


def counted(connection: Connection) -> dict[str, StoredAmounts]:
    """Return the amounts that the history has counted, of owners that store something."""
    rows = connection.execute(
        "SELECT owner, sum(num_conversations), sum(num_responses), sum(num_bytes) FROM stored_amounts "
        "GROUP BY owner"
    )
    return {row[0]: StoredAmounts(*map(int, row[1:])) for row in rows.fetchall() if any(row[1:])}


def recounted(connection: Connection, *, escapes: bool = False) -> dict[str, StoredAmounts]:
    """Return the amounts of each owner with rows; `escapes` as in a history in Postgres."""
    found: dict[str, list[int]] = {}
    for table, columns in _SIZED.items():
        for owner, *values in connection.execute(
            f"SELECT owner, {', '.join(columns)} FROM {table}"
        ).fetchall():
            amounts = found.setdefault(owner, [0, 0, 0])
            amounts[0] += table == "conversations" and values[1] is not None
            amounts[1] += table == "responses"
            amounts[2] += _ROW_BYTES + sum(map(_size, values))
            if escapes:  # Postgres escapes NUL and escape with one more character each
                texts = [value for value in values if isinstance(value, str)]
                amounts[2] += sum(text.count("\0") + text.count("\x1b") for text in texts)
    return {owner: StoredAmounts(*amounts) for owner, amounts in found.items()}


def _size(value: str | bytes | None) -> int:
    if value is None:
        return 0
    return len(value.encode() if isinstance(value, str) else value)
