"""The tables of a history in Postgres: a schema of its own that is created, accepted or refused.

Owns: the Postgres form of the tables of `schema`, the marks that identify a history, and the lock that
replicas share.
Does not know: what is written into the tables, or how to connect.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pensieve_jax.core.errors import HistoryMismatchError, HistoryMissingError
from pensieve_jax.history import schema, stored_amounts
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.postgres_location import PostgresLocation

MARK: Final = "a history of Pensieve"

# SQLite's type names. Ids are compared byte by byte, as in SQLite, in any locale of the database.
_TYPES: Final = {"TEXT": 'text COLLATE "C"', "INTEGER": "bigint", "REAL": "double precision"}
_WORD: Final = re.compile("|".join(rf"\b{word}\b" for word in _TYPES))
_TYPE_CHECK: Final = re.compile(r"typeof\(\w+\) = 'blob' AND ")
_TABLES: Final = "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace(?)"
_IS_THERE: Final = "SELECT to_regclass(?) IS NOT NULL"
_MARK_NEWEST: Final = "UPDATE meta SET value = ? WHERE key = 'schema_version'"
_META: Final = "SELECT key, value FROM meta WHERE key IN ('fingerprint', 'mark', 'schema_version')"


def open_namespace(
    connection: Connection, location: PostgresLocation, fingerprint: str, *, may_make: bool
) -> None:
    """Create the tables or check that they are of this model and release; the caller holds a transaction.

    Raises HistoryMismatchError or HistoryMissingError; nothing is created then.
    """
    namespace = location.namespace
    # Not the lock of the history's transactions: two servers that start at once must not both create tables.
    connection.execute("SELECT pg_advisory_xact_lock(?, hashtext(?))", (schema.APPLICATION_ID, namespace))
    if _is_there(connection, namespace):
        version = check(connection, location, fingerprint, accepts_older=True)
        if version != schema.SCHEMA_VERSION:
            _upgrade(connection, namespace)
        return
    (num_others,) = connection.execute(_TABLES, (namespace,)).fetchone()
    if num_others:
        raise _foreign(location)
    if not may_make:
        raise HistoryMissingError(
            f"history is {location.shown!r}, where the history is missing now; find it, or restore a backup. "
            "Nothing was created there."
        )
    (encoding,) = connection.execute("SHOW server_encoding").fetchone()
    if encoding != "UTF8":
        raise HistoryMismatchError(
            f"history is {location.shown!r}, a database of the encoding {encoding}, but must be one of UTF8."
        )
    _create(connection, namespace, fingerprint)


def check(
    connection: Connection,
    location: PostgresLocation,
    fingerprint: str | None,
    *,
    accepts_older: bool = False,
) -> int:
    """Return the version of a history; raise HistoryMismatchError unless it is of this release and model.

    With `fingerprint` None, the model and the version do not matter. With `accepts_older`, the version may be
    one that can be upgraded.
    """
    if not _is_there(connection, location.namespace):
        raise HistoryMismatchError(f"history is {location.shown!r}, where there is no history.")
    marks = dict(connection.execute(_META).fetchall())
    if marks.get("mark") != MARK:
        raise _foreign(location)
    version = int(marks["schema_version"])
    if fingerprint is None:
        return version
    older = schema.OLDER_VERSIONS if accepts_older else ()
    if version not in (*older, schema.SCHEMA_VERSION):
        raise HistoryMismatchError(
            f"history is {location.shown!r}, which has schema version {version}, but this release reads and "
            f"writes version {schema.SCHEMA_VERSION}; {schema.how_to_read(version)}, or give another "
            "namespace: ?namespace=NAME at the end of the URL. It was not changed."
        )
    if marks["fingerprint"] != fingerprint:
        raise HistoryMismatchError(
            f"history is {location.shown!r}, which was written by {marks['fingerprint']!r}, but the model in "
            f"use is {fingerprint!r}; load the model and tokenizer that wrote it, or give another namespace: "
            "?namespace=NAME at the end of the URL. It was not changed."
        )
    return version


def fingerprint_of(connection: Connection, location: PostgresLocation) -> str:
    """Return the fingerprint of a history's model; raise HistoryMismatchError for a missing history."""
    check(connection, location, None)
    return str(dict(connection.execute(_META).fetchall())["fingerprint"])


def lock_together(connection: Connection, namespace: str) -> None:
    """For transactions that add turns: exclude those that remove turns until the end of the transaction."""
    connection.execute(
        "SELECT pg_advisory_xact_lock_shared(?, hashtext(?))", (schema.APPLICATION_ID + 1, namespace)
    )


def lock_alone(connection: Connection, namespace: str) -> None:
    """For transactions that remove turns: exclude all other writers until the end of the transaction.

    Whether something needs a turn is only certain while no other transaction adds something that does.
    """
    connection.execute("SELECT pg_advisory_xact_lock(?, hashtext(?))", (schema.APPLICATION_ID + 1, namespace))


def ddl(statement: str) -> str:
    """Return a CREATE statement as Postgres needs it; rows of tables are numbered in order of insertion."""
    statement = _TYPE_CHECK.sub("", _WORD.sub(lambda word: _TYPES[word[0]], statement))
    if statement.startswith("CREATE TABLE") and "PRIMARY KEY (" in statement:
        rowid = ",\n  rowid bigint GENERATED ALWAYS AS IDENTITY UNIQUE"
        statement = f"{statement.rstrip().removesuffix(')').rstrip()}{rowid}\n)"
    return statement


def _create(connection: Connection, namespace: str, fingerprint: str) -> None:
    connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{namespace}"')  # quoted, as it may be an SQL keyword
    connection.execute("CREATE DOMAIN blob AS bytea")
    for statement in (schema.META, *schema.TABLES, stored_amounts.POSTGRES_TABLE):
        connection.execute(ddl(statement))
    for statement in stored_amounts.postgres_triggers():
        connection.execute(statement)
    marks: dict[str, Any] = {
        "mark": MARK,
        "schema_version": str(schema.SCHEMA_VERSION),
        "fingerprint": fingerprint,
    }
    for pair in marks.items():
        connection.execute("INSERT INTO meta VALUES (?, ?)", pair)


def _upgrade(connection: Connection, namespace: str) -> None:
    """Upgrade a history of an older version to the newest one.

    Servers of an earlier release may use it meanwhile: they wait for the lock, and the triggers count what
    they write afterwards.
    """
    lock_alone(connection, namespace)
    connection.execute("SET LOCAL statement_timeout = 0")  # it reads all rows
    connection.execute(ddl(f"ALTER TABLE responses ADD COLUMN {schema.STARTS}"))
    connection.execute(ddl(schema.KEPT_BY_ACTIVITY))
    connection.execute(ddl(stored_amounts.POSTGRES_TABLE))
    connection.execute(stored_amounts.recount_in_postgres())
    for statement in stored_amounts.postgres_triggers():
        connection.execute(statement)
    connection.execute(_MARK_NEWEST, (str(schema.SCHEMA_VERSION),))


def _is_there(connection: Connection, namespace: str) -> bool:
    (is_there,) = connection.execute(_IS_THERE, (f"{namespace}.meta",)).fetchone()
    return bool(is_there)


def _foreign(location: PostgresLocation) -> HistoryMismatchError:
    return HistoryMismatchError(
        f"history is {location.shown!r}, where the schema {location.namespace!r} is of another application; "
        "give another one: ?namespace=NAME at the end of the URL. It was not changed."
    )
