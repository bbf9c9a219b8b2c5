"""The history store on Postgres, which replicas of a server share.

Owns: the transactions of `HistoryStore`, one session, and the recovery of a lost session.
Does not know: the statements of a method (`table_store`), the tables (`postgres_schema`), or psycopg beyond
its errors (`postgres_connection`).

Turns never change, and heads move by compare and swap. If two replicas continue the same head, one of them
gets ConversationChangedError, and nothing of its turn is stored. Transactions that add turns run
concurrently; one that removes turns runs alone, by a lock in the database.

A commit takes one round trip: all its statements are sent at once, and each fails if it changes nothing. If
one fails, everything is repeated statement by statement, to find which turn is refused and why. If the
session is lost meanwhile, the ids of the turns tell whether the commit was stored; only a commit that was not
is retried.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import psycopg

from pensieve_jax.core.errors import HistoryError, InvalidRequestError, PensieveError
from pensieve_jax.history import postgres_schema, table_store, turns_table
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.postgres_connection import (
    PostgresConnection,
    as_history_error,
    is_lost,
    is_overtaken,
    is_refusal,
)
from pensieve_jax.history.postgres_location import PostgresLocation, parse
from pensieve_jax.history.store import ConversationInfo
from pensieve_jax.history.table_store import Commit, TableHistoryStore

_READING: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_MAX_NAME_BYTES: Final = 2000
_NUM_TRIES: Final = 5  # of a transaction that Postgres aborts in favor of another one


class _LostError(Exception):
    """A lost session. Unless it is a `_LostCommitError`, nothing of its transaction was stored."""

    def __init__(self, history_error: HistoryError) -> None:
        super().__init__(str(history_error))
        self.history_error = history_error


class _LostCommitError(_LostError):
    """A session lost when its transaction may have committed; `result` is then the transaction's result."""

    def __init__(self, history_error: HistoryError, result: Any) -> None:
        super().__init__(history_error)
        self.result = result


class PostgresHistoryStore(TableHistoryStore):
    """A `HistoryStore` in one schema of a database. See the protocol for the contract of each method.

    Thread-safe: one session behind one mutex. The next call replaces a lost session, and raises
    HistoryUnavailableError if Postgres is still not available.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, url: str, *, fingerprint: str, may_make: bool = True) -> None:
        """Open or create the history at a URL.

        Args:
          url: see `postgres_location`.
          fingerprint: the writer's identity, from `history_fingerprint`; a history with another is refused.
          may_make: whether a schema without tables is a new history.

        Raises:
          ConfigError: the URL is invalid.
          HistoryDeniedError: the database refuses the user or the password.
          HistoryUnavailableError: the database cannot be reached.
          HistoryMismatchError: written by another model, tokenizer or application, or with another schema
            version; it is not changed.
          HistoryMissingError: the history is missing, and `may_make` is False.
        """
        self._location = parse(url)
        self._mutex = threading.RLock()
        self._is_closed = False
        self._session: PostgresConnection | None = None

        def accept(connection: Connection) -> None:
            postgres_schema.open_namespace(connection, self._location, fingerprint, may_make=may_make)

        opened = False
        try:
            self._transaction(accept, lambda connection, namespace: None)
            opened = True
        except _LostError as lost:
            raise lost.history_error from lost
        finally:
            if not opened:
                self.close()

    def close(self) -> None:
        """End the session; a second call does nothing."""
        with self._mutex:
            self._is_closed = True
            self._drop()

    def info(self, conversation_id: str) -> ConversationInfo:
        """See `HistoryStore.info`; it refuses an impossible name before a turn runs and cannot be stored."""
        self._check_name(conversation_id, "conversation_id")
        return super().info(conversation_id)

    def _check_name(self, name: str, field: str) -> None:
        super()._check_name(name, field)
        if (error := _refusal_of_name(name, field)) is not None:
            raise error

    @property
    def _connection(self) -> PostgresConnection:
        """The session, reconnected if necessary; raises HistoryError."""
        if self._is_closed:
            raise HistoryError(f"history is {self._location.shown!r}, which is closed.")
        if self._session is not None and not self._session.is_usable:
            self._drop()
        if self._session is None:
            self._session = PostgresConnection(self._location)
        return self._session

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _run[T](self, work: Callable[[Connection], T]) -> T:
        with self._mutex:
            try:
                return self._transaction(work, _no_lock, _READING)
            except _LostError:  # reads are safe to repeat
                return self._once_more(work, _no_lock, _READING)

    def _transact[T](self, change: Callable[[Connection], T]) -> T:
        with self._mutex:
            try:
                return self._transaction(change, postgres_schema.lock_alone)
            except _LostCommitError as lost:
                raise lost.history_error from lost
            except _LostError:
                return self._once_more(change, postgres_schema.lock_alone)

    def _once_more[T](
        self, change: Callable[[Connection], T], lock: Callable[[Connection, str], None], begin: str = "BEGIN"
    ) -> T:
        try:
            return self._transaction(change, lock, begin)
        except _LostError as lost:
            raise lost.history_error from lost

    def _commit(self, commits: Sequence[Commit], in_use: Collection[str]) -> Mapping[int, PensieveError]:
        # A transaction holds the row of an owner's amounts from its first turn on. All transactions take
        # these rows in the same order, so that none waits for one that waits for it.
        order = sorted(range(len(commits)), key=lambda index: commits[index].row.owner)
        refused = self._commit_in_order([commits[index] for index in order])
        return {order[place]: why for place, why in refused.items()}

    def _commit_in_order(self, commits: Sequence[Commit]) -> Mapping[int, PensieveError]:
        commits = [_with_a_short_name(commit) for commit in commits]
        with self._mutex:
            try:
                return self._add(commits)
            except _LostCommitError as lost:
                history_error, refused = lost.history_error, lost.result
            except _LostError:
                return self._add_for_certain(commits)
            placed = [commit for index, commit in enumerate(commits) if index not in refused]
            if not all(commit.row.turn_id for commit in placed):
                raise history_error
            try:
                # The lock waits for a lost session that Postgres has not ended yet.
                if self._transaction(
                    lambda connection: _are_there(connection, placed), postgres_schema.lock_alone
                ):
                    return refused
                again = self._add_for_certain(commits)
                # The lost session may have committed only now.
                return {index: why for index, why in again.items() if not self._has(commits[index])}
            except (_LostError, HistoryError) as error:
                # Unknown: the server may not have read the first try's statements yet.
                raise history_error from error

    def _add_for_certain(self, commits: Sequence[Commit]) -> Mapping[int, PensieveError]:
        try:
            return self._add(commits)
        except _LostError as lost:
            raise lost.history_error from lost

    def _add(self, commits: Sequence[Commit]) -> Mapping[int, PensieveError]:
        """Add turns, in one round trip if all can be added; raise _LostError."""
        if self._add_ahead(commits):
            return {}
        return self._transaction(
            lambda connection: table_store.append_all(connection, commits), postgres_schema.lock_together
        )

    def _add_ahead(self, commits: Sequence[Commit]) -> bool:
        """Try to add all turns in one round trip; return whether it succeeded. If not, nothing was added."""
        if not all(commit.row.turn_id and commit.refusal is None for commit in commits):
            return False
        session = self._connection
        try:
            with session.pipelined() as connection:
                connection.execute("BEGIN")
                postgres_schema.lock_together(connection, self._location.namespace)
                for commit in commits:
                    table_store.append(connection, commit)
                connection.execute("COMMIT")
            return True
        except PensieveError:
            self._roll_back(session)
            return False
        except psycopg.Error as error:
            if is_lost(error, session):
                self._drop()
                history_error = as_history_error(error, self._location, may_be_kept=True)
                raise _LostCommitError(history_error, {}) from error  # {}: it would have refused no turn
            self._roll_back(session)
            if not is_refusal(error) and not is_overtaken(error):
                raise as_history_error(error, self._location) from error
            return False
        except BaseException:
            self._drop()
            raise

    def _has(self, commit: Commit) -> bool:
        return self._run(lambda connection: _are_there(connection, [commit]))

    def _transaction[T](
        self,
        change: Callable[[Connection], T],
        lock: Callable[[Connection, str], None],
        begin: str = "BEGIN",
    ) -> T:
        """Make all of a change or nothing; raise _LostError, and what the change raises."""
        for tries_left in reversed(range(_NUM_TRIES)):
            session, is_committing = self._connection, False
            try:
                session.execute(begin)
                lock(session, self._location.namespace)
                result = change(session)
                is_committing = True
                session.execute("COMMIT")
                return result
            except psycopg.Error as error:
                if is_lost(error, session):
                    self._drop()
                    history_error = as_history_error(error, self._location, may_be_kept=is_committing)
                    if is_committing:
                        raise _LostCommitError(history_error, result) from error
                    raise _LostError(history_error) from error
                self._roll_back(session)
                if not is_overtaken(error) or not tries_left:
                    raise as_history_error(error, self._location) from error
            except PensieveError:
                self._roll_back(session)
                raise
            except BaseException:  # an interrupt: the session may be in any state
                self._drop()
                raise
        raise AssertionError("the last try returns or raises")

    def _roll_back(self, session: PostgresConnection) -> None:
        try:
            if session.in_transaction:
                session.execute("ROLLBACK")
        except psycopg.Error:
            self._drop()


def fingerprint_in(location: PostgresLocation) -> str:
    """Return the fingerprint of the model that wrote a history; raise HistoryError for a missing history."""
    with _session(location) as session:
        return postgres_schema.fingerprint_of(session, location)


@contextlib.contextmanager
def _session(location: PostgresLocation) -> Iterator[PostgresConnection]:
    """Open a session for one block, whose transaction is rolled back if the block raises."""
    with contextlib.closing(PostgresConnection(location)) as session:
        try:
            yield session
        except psycopg.Error as error:
            raise as_history_error(error, location) from error


def _with_a_short_name(commit: Commit) -> Commit:
    """Return the commit, refused if the name of its conversation is too long for an index."""
    refusal = _refusal_of_name(commit.conversation_id, "conversation_id")
    return commit if refusal is None else commit._replace(refusal=refusal)


def _refusal_of_name(name: str, field: str) -> InvalidRequestError | None:
    if len(name.encode()) <= _MAX_NAME_BYTES:
        return None
    limit = f"at most {_MAX_NAME_BYTES} bytes in a history in Postgres"
    return InvalidRequestError(field, f"{name[:20]}...", limit)


def _are_there(connection: Connection, commits: Sequence[Commit]) -> bool:
    """Return whether all of them exist; another server that ran the same turn may have stored it, too."""
    return all(
        turns_table.exists(connection, "" if one.conversation_id else one.row.owner, one.row.turn_id)
        for one in commits
    )


def _no_lock(connection: Connection, namespace: str) -> None:
    """Take no lock, as reads need none."""
