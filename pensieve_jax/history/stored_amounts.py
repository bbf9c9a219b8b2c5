"""What each owner stores: numbers of conversations and responses, and bytes.

Owns: the table `stored_amounts`, which rows count and for how much, and the triggers that keep the amounts.
Does not know: limits, or who adds and removes rows.

Triggers of the database change an owner's amounts in the transaction that changes a row. So the amounts are
exact after any change, failure or restart.

A transaction locks the row that it changes until its end. In Postgres, an owner therefore has several rows,
whose sums are the amounts. Sessions choose one by their process ids, so that servers that commit for one
owner at a time do not wait for each other. A row alone may be negative.

A row counts with the bytes of its texts and blobs, and with `ROW_BYTES` for everything else. Text counts in
UTF-8, and in Postgres as it is escaped there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from pensieve_jax.history.connection import Connection

ROW_BYTES: Final = 256
"""Bytes for the ids, numbers, times and index entries of a row."""
NUM_PARTS: Final = 16
"""Rows of an owner in Postgres."""

TABLE: Final = """CREATE TABLE stored_amounts(
  owner TEXT NOT NULL,
  num_conversations INTEGER NOT NULL,
  num_responses INTEGER NOT NULL,
  num_bytes INTEGER NOT NULL,
  PRIMARY KEY (owner)
)"""

POSTGRES_TABLE: Final = f"""CREATE TABLE stored_amounts(
  owner TEXT NOT NULL,
  num_conversations INTEGER NOT NULL,
  num_responses INTEGER NOT NULL,
  num_bytes INTEGER NOT NULL,
  part INTEGER NOT NULL DEFAULT (pg_backend_pid() % {NUM_PARTS}),
  PRIMARY KEY (owner, part)
)"""


class StoredAmounts(NamedTuple):
    """What one owner stores; conversations are those of a server."""

    num_conversations: int = 0
    num_responses: int = 0
    num_bytes: int = 0


class _Counted(NamedTuple):
    """A table whose rows count.

    `sized` are its columns of any length, and `updated` those of them that an UPDATE may change.
    """

    table: str
    sized: tuple[str, ...]
    updated: tuple[str, ...] = ()
    conversations: str = "0"
    responses: str = "0"


_COUNTED: Final = (
    _Counted("turns", ("prompt_ids", "output_ids", "messages", "output_text", "usage")),
    _Counted(
        "conversations",
        ("conversation_id", "metadata"),
        ("metadata",),
        conversations="(CASE WHEN {row}.metadata IS NULL THEN 0 ELSE 1 END)",
    ),
    _Counted("items", ("item_id", "item")),
    _Counted("responses", ("request", "input_items", "error", "job"), ("error", "job"), responses="1"),
    _Counted("idempotency", ("key",)),
)
_AMOUNTS: Final = StoredAmounts._fields


def find(connection: Connection, owner: str) -> StoredAmounts:
    """Return what an owner stores."""
    return _sums(connection, "WHERE owner = ?", owner)


def total(connection: Connection) -> StoredAmounts:
    """Return what all owners store together."""
    return _sums(connection)


def _sums(connection: Connection, where: str = "", *values: str) -> StoredAmounts:
    sums = ", ".join(f"coalesce(sum({name}), 0)" for name in _AMOUNTS)
    query = f"SELECT {sums} FROM stored_amounts {where}"
    return StoredAmounts(*map(int, connection.execute(query, values).fetchone()))


def sqlite_triggers() -> list[str]:
    """Return the statements that create the triggers in SQLite."""
    found = []
    for one in _COUNTED:
        after, before = _add(one, _sqlite_bytes, "owner"), _subtract(one, _sqlite_bytes)
        events = {"INSERT": after, "DELETE": before}
        if one.updated:
            events[f"UPDATE OF {', '.join(one.updated)}"] = f"{after}; {before}"
        for event, work in events.items():
            name = f"count_{one.table}_{event.split()[0].lower()}"
            found.append(f"CREATE TRIGGER {name} AFTER {event} ON {one.table} BEGIN {work}; END")
    return found


def postgres_triggers() -> list[str]:
    """Return the statements that create the triggers in Postgres, each with its function."""
    found = []
    for one in _COUNTED:
        name = f"count_{one.table}"
        found.append(
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF TG_OP <> 'DELETE' THEN {_add(one, _postgres_bytes, 'owner, part')}; END IF; "
            f"IF TG_OP <> 'INSERT' THEN {_add(one, _postgres_bytes, 'owner, part', '-')}; END IF; "
            "RETURN NULL; END $$"
        )
        events = "INSERT OR DELETE" + (f" OR UPDATE OF {', '.join(one.updated)}" if one.updated else "")
        found.append(
            f"CREATE TRIGGER {name} AFTER {events} ON {one.table} FOR EACH ROW EXECUTE FUNCTION {name}()"
        )
    return found


def recount_in_sqlite() -> str:
    """Return the statement that adds the amounts of all rows in SQLite to an empty table."""
    return _recount(_sqlite_bytes)


def recount_in_postgres() -> str:
    """Return the statement that adds the amounts of all rows in Postgres to an empty table."""
    return _recount(_postgres_bytes)


def _recount(num_bytes: Callable[[str], str]) -> str:
    rows = " UNION ALL ".join(
        f"SELECT owner, {', '.join(_amounts(one, one.table, num_bytes))} FROM {one.table}" for one in _COUNTED
    )
    names = ", ".join(_AMOUNTS)
    sums = ", ".join(f"sum({name})" for name in _AMOUNTS)
    return (
        f"INSERT INTO stored_amounts WITH counted(owner, {names}) AS ({rows}) "
        f"SELECT owner, {sums} FROM counted GROUP BY owner"
    )


def _add(one: _Counted, num_bytes: Callable[[str], str], key: str, sign: str = "") -> str:
    """Return the statement that adds a new row to its owner's amounts, or with "-" subtracts an old one."""
    row = "OLD" if sign else "NEW"
    amounts = [sign + amount for amount in _amounts(one, row, num_bytes)]
    sums = ", ".join(f"{name} = stored_amounts.{name} + excluded.{name}" for name in _AMOUNTS)
    return (
        f"INSERT INTO stored_amounts VALUES ({row}.owner, {', '.join(amounts)}) "
        f"ON CONFLICT ({key}) DO UPDATE SET {sums}"
    )


def _subtract(one: _Counted, num_bytes: Callable[[str], str]) -> str:
    """Return the statement that subtracts an old row, if its owner has one row of amounts."""
    amounts = _amounts(one, "OLD", num_bytes)
    pairs = zip(_AMOUNTS, amounts, strict=True)
    differences = ", ".join(f"{name} = {name} - {amount}" for name, amount in pairs)
    return f"UPDATE stored_amounts SET {differences} WHERE owner = OLD.owner"


def _amounts(one: _Counted, row: str, num_bytes: Callable[[str], str]) -> list[str]:
    """Return the amounts of a row as expressions, in the order of `StoredAmounts`."""
    sizes = " + ".join([str(ROW_BYTES), *(num_bytes(f"{row}.{name}") for name in one.sized)])
    return [one.conversations.format(row=row), one.responses.format(row=row), f"({sizes})"]


def _sqlite_bytes(column: str) -> str:
    # SQLite before 3.43 has no octet_length, and its length counts the characters of a text.
    return f"coalesce(length(CAST({column} AS BLOB)), 0)"


def _postgres_bytes(column: str) -> str:
    return f"coalesce(octet_length({column}), 0)"
