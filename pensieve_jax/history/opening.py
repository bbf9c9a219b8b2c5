"""Opens a history wherever it is: a file for SQLite, memory, or a database of Postgres.

Owns: what tells a URL of Postgres from a path, and which store, reader and claims a history has.
Does not know: what either does.
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
    """Connections that only read."""

    def run[T](self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, which reads one state of the history; raises HistoryError."""
        ...

    def close(self) -> None:
        """Any later call raises HistoryError."""
        ...


def open_store(
    history: Location | None,
    *,
    fingerprint: str,
    synchronous: Synchronous = "normal",
    may_make: bool = True,
) -> TableHistoryStore:
    """The history at a path or a URL, new if there was none; None is in memory.

    Raises what `SQLiteHistoryStore` or `PostgresHistoryStore` raises. Postgres decides itself how durable a
    commit is; `synchronous` is of a file.
    """
    if is_postgres(history):
        need_psycopg(history)
        from pensieve_jax.history.postgres_store import PostgresHistoryStore  # of an extra

        return PostgresHistoryStore(str(history), fingerprint=fingerprint, may_make=may_make)
    return SQLiteHistoryStore(history, fingerprint=fingerprint, synchronous=synchronous, may_make=may_make)


def open_for_reading(history: Location, fingerprint: str) -> Reading:
    """Connections to a history that a writer has made; raises HistoryError."""
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
    """Claims among the servers of a history; nothing is asked yet."""
    if is_postgres(history):
        from pensieve_jax.history.postgres_claims import PostgresClaims  # of an extra

        return PostgresClaims(parse(str(history)))
    return OwnClaims()


def check_reachable(history: Location) -> None:
    """Raise what keeps a Postgres from being used, at once; of a file nothing is asked."""
    if is_postgres(history):
        need_psycopg(history)
        from pensieve_jax.history.postgres_connection import PostgresConnection  # of an extra

        PostgresConnection(parse(str(history))).close()


def need_psycopg(url: str) -> None:
    """Raise ConfigError where what a URL takes is not installed."""
    if importlib.util.find_spec("psycopg") is None:
        hint = "psycopg is missing: pip install '.[postgres]' in the checkout"
        raise ConfigError("history", shown(url), "the path of a file", hint)


def check_location(history: object) -> None:
    """Raise ConfigError for what is neither None nor of a type that a history's place can have."""
    if history is not None and not isinstance(history, str | os.PathLike):
        raise ConfigError("history", history, "None, the path of a file, or a URL of Postgres")


def absolute(history: Location) -> str:
    """As another process finds it, whatever its directory; raises ConfigError for what is no place."""
    check_location(history)
    return str(history) if is_postgres(history) else str(Path(history).absolute())


def shown(history: Location) -> str:
    """For people and logs: a URL without its password."""
    return parse(str(history)).shown if is_postgres(history) else str(history)
