"""A recount of what each owner stores, by reading every row: the oracle of `stored_amounts`."""

from __future__ import annotations

from typing import Any

from pensieve_jax.history import stored_amounts
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.stored_amounts import StoredAmounts
from pensieve_jax.history.table_store import TableHistoryStore

_SIZED = {
    "turns": ("prompt_ids", "output_ids", "messages", "output_text", "usage"),
    "conversations": ("conversation_id", "metadata"),
    "items": ("item_id", "item"),
    "responses": ("request", "input_items", "error", "job"),
    "idempotency": ("key",),
}


def size(value: str | bytes | None) -> int:
    """Return the bytes of a value; Postgres escapes NUL and escape with one more character each."""
    if value is None:
        return 0
    return len(value.encode() if isinstance(value, str) else value)


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
            amounts[2] += 256 + sum(map(size, values))
            if escapes:
                texts = [value for value in values if isinstance(value, str)]
                amounts[2] += sum(text.count("\0") + text.count("\x1b") for text in texts)
    return {owner: StoredAmounts(*amounts) for owner, amounts in found.items()}


def counted(connection: Connection) -> dict[str, StoredAmounts]:
    """Return the amounts that the history has counted, of owners that store something."""
    rows: Any = connection.execute(
        "SELECT owner, num_conversations, num_responses, num_bytes FROM stored_amounts"
    ).fetchall()
    assert all(stored_amounts.find(connection, row[0]) == StoredAmounts(*row[1:]) for row in rows)
    return {row[0]: StoredAmounts(*row[1:]) for row in rows if any(row[1:])}


def check_amounts(store: TableHistoryStore) -> dict[str, StoredAmounts]:
    """Assert that the counted amounts equal a recount, and return them."""

    def both(connection: Connection) -> Any:
        expected = recounted(connection, escapes=store.is_shared)
        sums = StoredAmounts(*(sum(column) for column in zip(*expected.values(), strict=True)))
        assert stored_amounts.total(connection) == (sums if expected else StoredAmounts())
        return counted(connection), expected

    found, expected = store.read(both)
    assert found == expected
    return found
