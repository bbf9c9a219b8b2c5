"""A check of what each owner stores against a recount of every row."""

from __future__ import annotations

from typing import Any

from pensieve_jax.history import stored_amounts
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.stored_amounts import StoredAmounts
from pensieve_jax.history.table_store import TableHistoryStore
from pensieve_lab.races.amounts import counted, recounted


def check_amounts(store: TableHistoryStore) -> dict[str, StoredAmounts]:
    """Assert that the counted amounts equal a recount, and return them."""

    def both(connection: Connection) -> Any:
        expected = recounted(connection, escapes=store.is_shared)
        sums = StoredAmounts(*(sum(column) for column in zip(*expected.values(), strict=True)))
        assert stored_amounts.total(connection) == (sums if expected else StoredAmounts())
        found = counted(connection)
        assert all(stored_amounts.find(connection, owner) == each for owner, each in found.items())
        return found, expected

    found, expected = store.read(both)
    assert found == expected
    return found
