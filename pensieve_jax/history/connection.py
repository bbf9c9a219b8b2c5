"""The connection interface of the modules with tables, and its implementation for SQLite.

Owns: the few operations that differ between SQLite and Postgres: a statement that must change a row, the
beginning of a long text, and reading many rows.
Does not know: tables, transactions, or Postgres (`postgres_connection`).

Statements use the SQL that both databases understand, with `?` for values. A key that is taken is detected by
`ON CONFLICT DO NOTHING` and no changed row, since Postgres aborts a transaction after a failed statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pensieve_jax.core.errors import PensieveError


class ResultRows(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """The number of rows that the statement changed."""
        ...

    def fetchone(self) -> Any:
        """Return the next row, or None after the last one."""
        ...

    def fetchall(self) -> list[Any]:
        """Return all remaining rows."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the remaining rows."""
        ...


class Connection(Protocol):
    """A connection to a history in either database."""

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> ResultRows:
        """Run one statement with its values and return its result."""
        ...

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> object:
        """Run a statement for each of many rows."""
        ...

    def execute_changing(
        self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /
    ) -> None:
        """Run a statement that must change a row; raise the result of `refusal` if it changes none.

        A connection that pipelines statements reports this only at the end of the transaction, which is
        then rolled back.
        """
        ...

    def beginning(self, table: str, column: str, rowid: int, num_bytes: int, /) -> str:
        """Return about the first `num_bytes` bytes of a long text without reading the rest."""
        ...

    def stream(self, query: str, /) -> Iterator[Any]:
        """Yield the rows of a query without loading all of them into memory."""
        ...


class SQLiteConnection(sqlite3.Connection):
    """A `Connection` to SQLite."""

    def execute_changing(
        self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /
    ) -> None:
        try:
            changed = self.execute(statement, values).rowcount
        except sqlite3.IntegrityError as error:
            raise refusal() from error
        if not changed:
            raise refusal()

    def beginning(self, table: str, column: str, rowid: int, num_bytes: int, /) -> str:
        """See `Connection`; SQLite's own string functions would read the whole text."""
        with self.blobopen(table, column, rowid, readonly=True) as text:
            return text.read(num_bytes).decode("utf-8", "ignore")

    def stream(self, query: str, /) -> Iterator[Any]:
        return iter(self.execute(query))
