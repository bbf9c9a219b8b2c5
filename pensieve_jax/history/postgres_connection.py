"""A `Connection` to Postgres through psycopg, and the meaning of its errors.

Owns: a session's settings, the translation of the tables' SQL for Postgres, pipelined statements, and the
mapping of failures to typed errors.
Does not know: tables, or when a transaction begins.

Text in Postgres cannot contain the character NUL, which a model may generate. So every value is escaped on
its way there and unescaped on its way back, with two other characters for NUL.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.types.string import StrDumper, TextLoader

from pensieve_jax.core.errors import (
    HistoryDeniedError,
    HistoryError,
    HistoryUnavailableError,
    PensieveError,
)
from pensieve_jax.history.postgres_location import PostgresLocation

CONNECT_TIMEOUT_S: Final = 5
_ROWS_AT_A_TIME: Final = 256
_ESCAPE: Final = "\x1b"
# A replica that hangs must not block the others forever, and a lossy network must not block this one.
_SETTINGS: Final = {
    "lock_timeout": "10s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
    "idle_session_timeout": "0",
    # On the server's side, the session of a lost host and its locks end within half a minute.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
_SOCKET: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20000,
}
_DENIED: Final = ("28", "42501")  # invalid authorization, insufficient privilege
# Errors of a server that is not available: it shuts down, starts, or has no room for sessions.
_AWAY: Final = ("08", "57P", "53300")
_BUSY: Final = ("55P03", "57014")  # a lock or an answer took too long


class PostgresConnection:
    """A session whose transactions are begun and ended by its user."""

    def __init__(self, location: PostgresLocation) -> None:
        """Connect; raise HistoryDeniedError, HistoryUnavailableError or another HistoryError."""
        self._location = location
        try:
            self._raw = psycopg.connect(
                location.url,
                autocommit=True,
                client_encoding="utf8",
                # psycopg does not notice that a pipelined PREPARE was skipped because an earlier statement
                # failed.
                prepare_threshold=None,
                **_given(location.url, {"connect_timeout": CONNECT_TIMEOUT_S, **_SOCKET}),
            )
        except psycopg.Error as error:
            raise _cannot_connect(error, location) from None  # the error's traceback contains the URL
        self._raw.adapters.register_dumper(str, _Dumper)
        self._raw.adapters.register_loader("text", _Loader)
        try:
            settings = {"search_path": location.namespace, **_SETTINGS}
            self.settings(settings)
        except psycopg.Error as error:
            self.close()
            raise as_history_error(error, location) from error

    @property
    def is_usable(self) -> bool:
        """Whether the session is not known to be broken."""
        return not self._raw.closed and self._raw.info.transaction_status is not TransactionStatus.UNKNOWN

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction has begun and not ended, failed or not."""
        return self._raw.info.transaction_status is not TransactionStatus.IDLE

    def settings(self, values: dict[str, str]) -> None:
        """Change settings of the session."""
        changes = ", ".join("set_config(%s, %s, false)" for _ in values)
        parameters = [part for pair in values.items() for part in pair]
        self._raw.execute(f"SELECT {changes}".encode(), parameters)

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """Run one statement, with `?` for its values, and return its result."""
        return self._raw.execute(_translated(statement), values)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> None:
        """See `Connection`; all rows take one round trip."""
        with self._raw.cursor() as cursor:
            cursor.executemany(_translated(statement), values)

    def execute_changing(
        self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /
    ) -> None:
        """Run a statement that must change a row; raise the result of `refusal` if it changes none."""
        try:
            changed = self.execute(statement, values).rowcount
        except psycopg.Error as error:
            if not is_refusal(error):
                raise
            raise refusal() from error
        if not changed:
            raise refusal()

    def beginning(self, table: str, column: str, rowid: int, num_bytes: int, /) -> str:
        """Return the first `num_bytes` characters of a text; "" if the row does not exist."""
        query = f"SELECT left({column}, ?) FROM {table} WHERE rowid = ?"
        row = self.execute(query, (num_bytes, rowid)).fetchone()
        return "" if row is None else str(row[0])

    def stream(self, query: str, /) -> Iterator[Any]:
        """See `Connection`; it needs a transaction."""
        with self._raw.cursor(name="stream") as cursor:
            cursor.itersize = _ROWS_AT_A_TIME
            cursor.execute(_translated(query))
            yield from cursor

    @contextlib.contextmanager
    def pipelined(self) -> Iterator[PipelinedConnection]:
        """Pipeline the statements of this block, so that all of them take one round trip.

        The end of the block waits. It raises the error of the first failed statement; later ones had no
        effect.
        """
        with self._raw.pipeline():
            yield PipelinedConnection(self._raw)

    def close(self) -> None:
        """End the session and roll back its transaction."""
        self._raw.close()


class PipelinedConnection:
    """A `Connection` that pipelines statements; their results are not available in between.

    Whether a statement changed a row is checked in the database: if not, it fails, and so does the
    transaction. The reason is not reported; to find it, the caller repeats everything statement by statement.
    """

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self._raw = raw

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """See `Connection`; fetching rows waits for the statements."""
        return self._raw.execute(_translated(statement), values)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> None:
        for row in values:
            self.execute(statement, row)

    def execute_changing(
        self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /
    ) -> None:
        """See `Connection`; a statement that changes no row fails with a division by zero."""
        # The row count of a pipelined statement arrives only after COMMIT was sent, too late to roll back.
        # So the check must fail inside Postgres: the statement divides by its number of changed rows.
        # `is_refusal` recognizes that error, and later statements and the COMMIT have no effect.
        self.execute(f"WITH done AS ({statement} RETURNING 1) SELECT 1 / count(*) FROM done", values)

    def beginning(self, table: str, column: str, rowid: int, num_bytes: int, /) -> str:
        """Refuse to read, since results are not available."""
        raise NotImplementedError

    def stream(self, query: str, /) -> Iterator[Any]:
        """Refuse to read, since results are not available."""
        raise NotImplementedError


def is_lost(error: psycopg.Error, connection: PostgresConnection) -> bool:
    """Return whether the session is lost, so that the outcome of its transaction is unknown.

    An error without a code is not the server's: the client library's own errors can replace the server's last
    message.
    """
    return not connection.is_usable or _is_away(error)


def is_refusal(error: psycopg.Error) -> bool:
    """Return whether a statement changed nothing or has values that cannot be stored; others may succeed."""
    return isinstance(error, psycopg.IntegrityError | psycopg.DataError)  # includes a division by zero


def is_overtaken(error: psycopg.Error) -> bool:
    """Return whether Postgres aborted a transaction in favor of another one; it may be retried."""
    return isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure)


def as_history_error(
    error: psycopg.Error, location: PostgresLocation, *, may_be_kept: bool = False
) -> HistoryError:
    """Return the error to report. It has only the first line, since other lines may quote users' texts."""
    reason = location.without_secret(_words(error))
    where, state = f"history is {location.shown!r}", _state(error)
    outcome = (
        "whether this call was stored is not known" if may_be_kept else "nothing of this call was stored"
    )
    if state.startswith(_DENIED):
        return HistoryDeniedError(f"{where}, which refuses this user ({reason}); {outcome}.")
    if state.startswith(_BUSY):
        return HistoryUnavailableError(f"{where}, which is too busy ({reason}); {outcome}.", may_be_kept)
    if _is_away(error):
        return HistoryUnavailableError(
            f"{where}, which cannot be reached ({reason}); {outcome}. The next call tries again.",
            may_be_kept,
        )
    return HistoryError(f"{where}, which could not be read or written ({reason}); {outcome}.")


def _cannot_connect(error: psycopg.Error, location: PostgresLocation) -> HistoryError:
    reason = location.without_secret(_words(error))
    where = f"history is {location.shown!r}"
    # The client library passes on the server's message, but not always its code.
    no_such_user = "role" in reason and "does not exist" in reason
    denied = no_such_user or "authentication failed" in reason or "no password" in reason
    if _state(error).startswith(_DENIED) or denied:
        return HistoryDeniedError(
            f"{where}, which refuses this user or password ({reason}); give the user in the URL, and the "
            "password in ~/.pgpass or PGPASSWORD."
        )
    if _state(error) == "3D000" or ("database" in reason and "does not exist" in reason):
        return HistoryError(f"{where}, where there is no such database ({reason}); create it first.")
    return HistoryUnavailableError(
        f"{where}, which cannot be reached ({reason}); check that Postgres runs and accepts connections."
    )


def _is_away(error: psycopg.Error) -> bool:
    state = _state(error)
    if state:
        return state.startswith(_AWAY)
    # Errors of the client library itself: it lost the server, or cannot parse what the server sends.
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or (
        type(error) is psycopg.DatabaseError
    )


def _words(error: psycopg.Error) -> str:
    words = error.diag.message_primary or str(error)
    return " ".join(words.split()) or type(error).__name__


def _state(error: psycopg.Error) -> str:
    return error.sqlstate or error.diag.sqlstate or ""


def _given(url: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return those of `defaults` that the URL does not set."""
    return {name: value for name, value in defaults.items() if f"{name}=" not in url}


@functools.cache
def _translated(statement: str) -> bytes:
    """Return the tables' SQL with psycopg's placeholders."""
    return statement.replace("%", "%%").replace("?", "%s").encode()


class _Dumper(StrDumper):
    def dump(self, obj: str) -> Any:
        if "\0" in obj or _ESCAPE in obj:
            obj = obj.replace(_ESCAPE, f"{_ESCAPE}E").replace("\0", f"{_ESCAPE}N")
        return super().dump(obj)


class _Loader(TextLoader):
    def load(self, data: Any) -> Any:
        text: Any = super().load(data)
        if _ESCAPE in text:
            text = text.replace(f"{_ESCAPE}N", "\0").replace(f"{_ESCAPE}E", _ESCAPE)
        return text
