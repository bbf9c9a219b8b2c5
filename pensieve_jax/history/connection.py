"""What the tables' modules ask of a connection, and a connection to SQLite that answers it.

Owns: the few things that SQLite and Postgres say differently: a statement that must change something, the
beginning of a long text, and reading many rows.
Does not know: tables, transactions, or Postgres (`postgres_connection`).

Statements are in the SQL that both understand, with `?` for values. What is taken already is told by `ON
CONFLICT DO NOTHING` and no row changed, since Postgres gives up a transaction with a failed statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pensieve_jax.core.errors import PensieveError


class ResultRows(Protocol):
    """What a statement found."""

    @property
    def rowcount(self) -> int:
        """How many rows it changed."""
        ...

    def fetchone(self) -> Any:
        """The next row; None behind the last one."""
        ...

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Those rows, one by one."""
        ...


class Connection(Protocol):
    """To a history, of either kind."""

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> ResultRows:
        """Run one statement with its values, and return what it found."""
        ...

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> object:
        """Run a statement for each of many rows."""
        ...

    def must(self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /) -> None:
        """Run a statement that must change a row; raises what `refusal` makes where it changes none.

        A connection that sends statements ahead tells it at the end of the transaction, which is then
        not kept.
        """
        ...

    def beginning(self, table: str, column: str, rowid: int, num_bytes: int, /) -> str:
        """Of a long text, about so many bytes, read without what comes behind."""
        ...

    def stream(self, query: str, /) -> Iterator[Any]:
        """Rows of a query that are not in memory all at a time."""
        ...


class SQLiteConnection(sqlite3.Connection):
    """A `Connection` to SQLite."""

    def must(self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /) -> None:
        try:
            changed = self.execute(statement, values).rowcount
        except sqlite3.IntegrityError as error:
            raise refusal() from error
        if not changed:
            raise refusal()

    def beginning(self, table: str, column: str, rowid: int, num_bytes: int, /) -> str:
        """See `Connection`; SQLite's own functions would read all of it."""
        with self.blobopen(table, column, rowid, readonly=True) as text:
            return text.read(num_bytes).decode("utf-8", "ignore")

    def stream(self, query: str, /) -> Iterator[Any]:
        return iter(self.execute(query))
