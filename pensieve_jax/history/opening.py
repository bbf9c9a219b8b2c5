"""Opening a history at any place: an SQLite file, memory, or a Postgres database.

Owns: how a URL of Postgres is told from a path, and which store, reader and claims a history has.
Does not know: how these work.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.history.claims import Claims, OwnClaims
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.database import Synchronous
from pensieve_jax.history.postgres_location import is_postgres, parse
from pensieve_jax.history.read_connections import read_file
from pensieve_jax.history.sqlite_store import SQLiteHistoryStore
from pensieve_jax.history.table_store import TableHistoryStore

type Location = str | os.PathLike[str]


class Reading(Protocol):
    """Read-only connections to a history.

    Attributes:
      is_damaged: whether a read has found the history itself damaged.
    """

    is_damaged: bool

    def run[T](self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one consistent state of the history and return its result; raise HistoryError."""
        ...

    def close(self) -> None:
        """Close the connections; later calls raise HistoryError."""
        ...


def open_store(
    history: Location | None,
    *,
    fingerprint: str,
    synchronous: Synchronous = "normal",
    may_make: bool = True,
) -> TableHistoryStore:
    """Open the history at a path or a URL, or create it; None is in memory.

    Raises what `SQLiteHistoryStore` or `PostgresHistoryStore` raises. `synchronous` applies to files;
    Postgres itself decides how durable a commit is.
    """
    if is_postgres(history):
        need_psycopg(history)
        from pensieve_jax.history.postgres_store import PostgresHistoryStore  # of an extra

        return PostgresHistoryStore(str(history), fingerprint=fingerprint, may_make=may_make)
    return SQLiteHistoryStore(history, fingerprint=fingerprint, synchronous=synchronous, may_make=may_make)


def open_for_reading(history: Location, fingerprint: str) -> Reading:
    """Open connections to a history that a writer has created; raise HistoryError."""
    connections: Any
    if is_postgres(history):
        need_psycopg(history)
        from pensieve_jax.history.postgres_reader import read_database  # of an extra

        connections = read_database(parse(str(history)), fingerprint)
    else:
        connections = read_file(Path(history).resolve(), fingerprint)
    found: Reading = connections
    return found


def claims_of(history: Location) -> Claims:
    """Return the claims among the servers of a history, without connecting yet."""
    if is_postgres(history):
        from pensieve_jax.history.postgres_claims import PostgresClaims  # of an extra

        return PostgresClaims(parse(str(history)))
    return OwnClaims()


def check_reachable(history: Location) -> None:
    """Raise immediately if a Postgres history cannot be used; a file is not checked."""
    if is_postgres(history):
        need_psycopg(history)
        from pensieve_jax.history.postgres_connection import PostgresConnection  # of an extra

        PostgresConnection(parse(str(history))).close()


def need_psycopg(url: str) -> None:
    """Raise ConfigError if the package for Postgres URLs is not installed."""
    if importlib.util.find_spec("psycopg") is None:
        hint = "psycopg is missing: pip install '.[postgres]' in the checkout"
        raise ConfigError("history", shown(url), "the path of a file", hint)


def check_location(history: object) -> None:
    """Raise ConfigError unless `history` is None or of a type that a location can have."""
    if history is not None and not isinstance(history, str | os.PathLike):
        raise ConfigError("history", history, "None, the path of a file, or a URL of Postgres")


def absolute(history: Location) -> str:
    """Return the location as another process finds it from any directory; raise ConfigError if invalid."""
    check_location(history)
    return str(history) if is_postgres(history) else str(Path(history).absolute())


def shown(history: Location) -> str:
    """Return the location for messages and logs: a URL without its password."""
    return parse(str(history)).shown if is_postgres(history) else str(history)
