"""A `Connection` to Postgres through psycopg, and what its errors mean.

Owns: a session's settings, the tables' SQL as Postgres takes it, statements that are sent ahead of their
answers, and which failure is which typed error.
Does not know: tables, or when a transaction is begun.

Text of Postgres cannot hold the character NUL, which a model may say: that stands as two others, on the way
there and back, in every value.
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
# A replica that hangs must not hold up the others for ever, nor a network that swallows packets this one.
_SETTINGS: Final = {
    "lock_timeout": "10s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
    "idle_session_timeout": "0",
    # Of the server's end: the session of a host that is gone, and its locks, end within half a minute.
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
# Of a server that is not there any more, or not yet: it goes down, it starts, it has no room for sessions.
_AWAY: Final = ("08", "57P", "53300")
_BUSY: Final = ("55P03", "57014")  # a lock or an answer took too long


class PostgresConnection:
    """A session whose transactions are begun and ended by whoever has it."""

    def __init__(self, location: PostgresLocation) -> None:
        """Connect; raises HistoryDeniedError, HistoryUnavailableError or another HistoryError."""
        self._location = location
        try:
            self._raw = psycopg.connect(
                location.url,
                autocommit=True,
                client_encoding="utf8",
                # A statement that is prepared ahead is not there if one before it failed, which psycopg
                # does not know.
                prepare_threshold=None,
                **_given(location.url, {"connect_timeout": CONNECT_TIMEOUT_S, **_SOCKET}),
            )
        except psycopg.Error as error:
            raise _cannot_connect(error, location) from None  # whose traceback has the URL
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
        """Nothing is known that speaks against it."""
        return not self._raw.closed and self._raw.info.transaction_status is not TransactionStatus.UNKNOWN

    @property
    def in_transaction(self) -> bool:
        """Between BEGIN and the end, failed or not."""
        return self._raw.info.transaction_status is not TransactionStatus.IDLE

    def settings(self, values: dict[str, str]) -> None:
        """Of the session, from now on."""
        changes = ", ".join("set_config(%s, %s, false)" for _ in values)
        parameters = [part for pair in values.items() for part in pair]
        self._raw.execute(f"SELECT {changes}".encode(), parameters)

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """Run one statement, whose values stand as `?`, and return what it found."""
        return self._raw.execute(_translated(statement), values)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> None:
        """See `Connection`; one round trip for all of them."""
        with self._raw.cursor() as cursor:
            cursor.executemany(_translated(statement), values)

    def must(self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /) -> None:
        """Run a statement that must change a row; raise what `refusal` makes where it changes none."""
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
        """See `Connection`; within a transaction."""
        with self._raw.cursor(name="stream") as cursor:
            cursor.itersize = _ROWS_AT_A_TIME
            cursor.execute(_translated(query))
            yield from cursor

    @contextlib.contextmanager
    def ahead(self) -> Iterator[PipelinedConnection]:
        """Statements sent without waiting for answers: all of them take one round trip.

        The end waits. Raises what the first that failed did; those behind it did nothing.
        """
        with self._raw.pipeline():
            yield PipelinedConnection(self._raw)

    def close(self) -> None:
        """End the session, and what it has not committed."""
        self._raw.close()


class PipelinedConnection:
    """A `Connection` whose statements are on their way together; what they find cannot be asked in between.

    That one of them must change a row is checked where it runs: if it does not, it fails, and with it the
    transaction. Why is not told; whoever wants to know does everything again, statement by statement.
    """

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self._raw = raw

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """See `Connection`; to fetch rows is to wait for them."""
        return self._raw.execute(_translated(statement), values)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> None:
        for row in values:
            self.execute(statement, row)

    def must(self, statement: str, values: Sequence[Any], refusal: Callable[[], PensieveError], /) -> None:
        """See `Connection`; a division by the number of changed rows."""
        self.execute(f"WITH done AS ({statement} RETURNING 1) SELECT 1 / count(*) FROM done", values)

    def beginning(self, table: str, column: str, rowid: int, num_bytes: int, /) -> str:
        """Nothing is read ahead."""
        raise NotImplementedError

    def stream(self, query: str, /) -> Iterator[Any]:
        """Nothing is read ahead."""
        raise NotImplementedError


def is_lost(error: psycopg.Error, connection: PostgresConnection) -> bool:
    """Whether the session is gone, so that nobody has said how its transaction ended.

    What has no code is not of the server: the client library's own errors can take the place of the
    server's last words.
    """
    return not connection.is_usable or _is_away(error)


def is_refusal(error: psycopg.Error) -> bool:
    """Whether a statement changed nothing, or cannot be kept as it is; another may be."""
    return isinstance(error, psycopg.IntegrityError | psycopg.DataError)  # a division by zero is of these


def is_overtaken(error: psycopg.Error) -> bool:
    """Whether Postgres has given up a transaction for the sake of another one; it may be tried again."""
    return isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure)


def as_history_error(
    error: psycopg.Error, location: PostgresLocation, *, may_be_kept: bool = False
) -> HistoryError:
    """What is told of an error of Postgres: its first line alone, since others may quote what was said."""
    reason = location.without_secret(_words(error))
    where, state = f"history is {location.shown!r}", _state(error)
    kept = "whether this call was kept is not known" if may_be_kept else "nothing of this call was kept"
    if state.startswith(_DENIED):
        return HistoryDeniedError(f"{where}, which refuses this user ({reason}); {kept}.")
    if state.startswith(_BUSY):
        return HistoryUnavailableError(f"{where}, which is too busy ({reason}); {kept}.", may_be_kept)
    if _is_away(error):
        return HistoryUnavailableError(
            f"{where}, which cannot be reached ({reason}); {kept}. The next call looks for it again.",
            may_be_kept,
        )
    return HistoryError(f"{where}, which could not be read or written ({reason}); {kept}.")


def _cannot_connect(error: psycopg.Error, location: PostgresLocation) -> HistoryError:
    reason = location.without_secret(_words(error))
    where = f"history is {location.shown!r}"
    # The client library passes on the words of the server, and not always its code.
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
        f"{where}, which cannot be reached ({reason}); see that Postgres runs there and takes connections."
    )


def _is_away(error: psycopg.Error) -> bool:
    state = _state(error)
    if state:
        return state.startswith(_AWAY)
    # What the client library says itself: that it lost the server, or its place in what that says.
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or (
        type(error) is psycopg.DatabaseError
    )


def _words(error: psycopg.Error) -> str:
    words = error.diag.message_primary or str(error)
    return " ".join(words.split()) or type(error).__name__


def _state(error: psycopg.Error) -> str:
    return error.sqlstate or error.diag.sqlstate or ""


def _given(url: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Those of `defaults` that a URL does not have itself."""
    return {name: value for name, value in defaults.items() if f"{name}=" not in url}


@functools.cache
def _translated(statement: str) -> bytes:
    """The tables' SQL with psycopg's placeholders."""
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
