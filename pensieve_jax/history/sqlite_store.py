"""The history store on SQLite, in a file or in memory.

Owns: the transactions of `HistoryStore`, the lock on the file, and one connection.
Does not know: the statements on each table (`turns_table` and its neighbours), the file's schema history and
damage (`database`), how a turn is packed (`codec`), jax.
Called by: `assembly`, which opens it, and the engine.

Durability: the file is in write-ahead mode. With `synchronous="normal"` a committed turn survives `kill -9`,
since its bytes are with the kernel; a power loss may take the last commits but never half of one. With "full"
each commit waits for the disk and survives that too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from pensieve_jax.core.errors import (
    ConfigError,
    HistoryCorruptError,
    HistoryError,
    InvalidRequestError,
    PensieveError,
)
from pensieve_jax.history import (
    codec,
    database,
    named_conversations,
    responses_table,
    server_conversations,
    turns_table,
)
from pensieve_jax.history.changes import (
    AppendItems,
    CreateConversation,
    DeleteConversation,
    DeleteItem,
    DeleteResponse,
    EndResponse,
    Expire,
    HistoryChange,
    QueueResponse,
    ResponseDraft,
    UpdateConversation,
)
from pensieve_jax.history.lock import FileLock
from pensieve_jax.history.store import ConversationInfo, ConversationRecord, TurnRecord

_NOTES = "note:"  # before the names of notes among the keys of `meta`


class _Commit(NamedTuple):
    """A turn to be added, checked and packed; `refusal` says why its attachment cannot be kept."""

    conversation_id: str
    row: codec.TurnRow
    draft: ResponseDraft | None
    items: Sequence[server_conversations.Item]
    refusal: InvalidRequestError | None


def _prepare(turn: TurnRecord, attachment: object, index: int) -> _Commit:
    row = codec.pack_turn(turn, f"turns[{index}]")
    if attachment is None:
        # Nothing else will need it: it is kept for itself.
        placed = row if turn.conversation_id else row._replace(kept=1)
        return _Commit(turn.conversation_id, placed, None, (), None)
    field = f"attachments[{index}]"
    try:
        if turn.conversation_id:
            raise InvalidRequestError(field, attachment, "None for a turn of a named conversation")
        draft, items = responses_table.check_draft(attachment, turn.owner, field)
    except InvalidRequestError as error:
        return _Commit("", row, None, (), error)
    return _Commit("", row, draft, items, None)


class SQLiteHistoryStore:
    """A `HistoryStore` in one SQLite file. See the protocol for what each method promises.

    Safe to call from several threads: one connection behind one mutex, so a reader waits for a commit under
    way and the other way round.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        fingerprint: str,
        synchronous: database.Synchronous = "normal",
        may_make: bool = True,
    ) -> None:
        """Open or make the history at `path` (None: in memory), read it through once, and lock it.

        Args:
          path: the file; its directory must exist. Beside it live `<name>.lock` and, while open, SQLite's
            `<name>-wal` and `<name>-shm`.
          fingerprint: who writes, from `history_fingerprint`; a file by anyone else is refused.
          synchronous: "normal" is safe against `kill -9`, "full" against power loss too (one fsync a commit).
          may_make: whether a missing or empty file is a new history; one in memory is always new.

        Raises:
          HistoryMismatchError: written by another model, tokenizer, version or application, or no database
            at all; left as it is.
          HistoryMissingError: there is none, and none may be made.
          HistoryLockedError: open already, in this process or in another.
          HistoryCorruptError: damaged; it has been moved aside (the message says where), and opening the path
            again starts a new history.
          HistoryError: the path cannot be used.
          ConfigError: `synchronous` or `path` is none of the values above.
        """
        if synchronous not in ("normal", "full"):
            raise ConfigError("synchronous", synchronous, '"normal" or "full"')
        if path is not None and os.fspath(path) in ("", ":memory:"):
            raise ConfigError("history", path, "the path of a file", "give None for a history in memory")
        # Resolved, so that two names of one file share one lock.
        self._path = None if path is None else Path(path).resolve()
        if self._path is not None and not may_make:
            database.check_is_there(self._path)  # before the lock, whose side file would stay
        self._mutex = threading.RLock()
        self._lock = None if self._path is None else FileLock(self._path)
        opened = False
        try:
            self._connection = database.open_database(self._path, fingerprint, synchronous)
            opened = True
        finally:
            if not opened and self._lock is not None:
                self._lock.discard()

    def conversations(self) -> list[ConversationInfo]:
        """All named conversations, the most recently active first, equal times by id."""
        return self._run(named_conversations.listing)

    def info(self, conversation_id: str) -> ConversationInfo:
        """A conversation's line of the listing, read without its tokens."""
        return self._run(lambda connection: named_conversations.info(connection, conversation_id))

    def load(self, conversation_id: str) -> ConversationRecord:
        """Read a whole conversation; also raises HistoryCorruptError if its tokens are damaged."""
        return named_conversations.unpack(
            *self._run(lambda connection: named_conversations.read(connection, conversation_id))
        )

    def load_turn(self, owner: str, turn_id: str) -> ConversationRecord:
        """Read the path to a turn; also raises HistoryCorruptError if its tokens are damaged."""
        rows = self._run(lambda connection: turns_table.path_rows(connection, owner, turn_id))
        return turns_table.unpack_path(rows, owner, turn_id)

    def has_turn(self, owner: str, turn_id: str) -> bool:
        """Whether a turn is there, read without its tokens."""
        return self._run(lambda connection: turns_table.exists(connection, owner, turn_id))

    def commit(
        self,
        turns: Sequence[TurnRecord],
        attachments: Sequence[object] = (),
        in_use: Collection[str] = (),
    ) -> Mapping[int, PensieveError]:
        """Append finished turns in one transaction; see `HistoryStore.commit`."""
        attached = attachments or itertools.repeat(None)
        commits = [
            _prepare(turn, attachment, index)
            for index, (turn, attachment) in enumerate(zip(turns, attached, strict=bool(attachments)))
        ]
        if not commits:
            return {}
        return self._transact(lambda connection: _append_all(connection, commits, in_use))

    def apply(self, change: HistoryChange, in_use: Collection[str] = ()) -> None:
        """Change what is kept beside turns, in one transaction; see `HistoryStore.apply`."""
        _check_texts(change)
        self._transact(lambda connection: _apply(connection, change, in_use))

    def truncate(self, conversation_id: str, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens; `HistoryStore.truncate` says what becomes of a cut turn."""
        return self._transact(
            lambda connection: named_conversations.truncate(connection, conversation_id, num_tokens)
        )

    def fork(self, conversation_id: str, new_conversation_id: str, num_tokens: int | None = None) -> int:
        """Have a new conversation begin as the first tokens of another one; see `HistoryStore.fork`."""
        return self._transact(
            lambda connection: named_conversations.fork(
                connection, conversation_id, new_conversation_id, num_tokens
            )
        )

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation; its space in the file is used again by later ones."""
        self._transact(lambda connection: named_conversations.delete(connection, conversation_id))

    def note(self, name: str) -> str | None:
        """A text that is kept beside the turns."""
        query = "SELECT value FROM meta WHERE key = ?"
        row = self._run(lambda connection: connection.execute(query, (_NOTES + name,)).fetchone())
        return None if row is None else str(row[0])

    def keep_note(self, name: str, text: str | None) -> None:
        """Keep a text in place of the one of that name; None removes it."""
        self._transact(lambda connection: _keep_note(connection, _NOTES + name, text))

    def close(self) -> None:
        """Fold the log into the file, release file and lock; a second call does nothing."""
        with self._mutex:
            try:
                self._connection.close()
            finally:
                if self._lock is not None:
                    self._lock.release()

    def __enter__(self) -> Self:
        """The store itself: `with SQLiteHistoryStore(...) as store` closes it at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()

    def _run[T](self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Work with the connection, alone on it; errors of SQLite come out as errors of the history."""
        with self._mutex:
            try:
                if self._connection.in_transaction:  # an interrupt came while another was rolled back
                    self._connection.execute("ROLLBACK")
                return work(self._connection)
            except sqlite3.Error as error:
                if database.is_damage(error):
                    raise HistoryCorruptError(
                        f"history is {str(self._path)!r}, which was damaged while it was open ({error}); "
                        "close it, and opening it again sets the damaged file aside."
                    ) from error
                raise HistoryError(
                    f"history is {str(self._path)!r}, which could not be read or written ({error}); nothing "
                    "of this call was kept. Check that the store is open and the disk has space, then try "
                    "again."
                ) from error

    def _transact[T](self, change: Callable[[sqlite3.Connection], T]) -> T:
        """`_run` in a transaction, rolled back if it raises anything, KeyboardInterrupt included."""

        def transaction(connection: sqlite3.Connection) -> T:
            try:
                connection.execute("BEGIN IMMEDIATE")
                result = change(connection)
                connection.execute("COMMIT")
                return result
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

        return self._run(transaction)


def _check_texts(change: HistoryChange) -> None:
    for field in dataclasses.fields(change):
        value = getattr(change, field.name)
        if field.type == "str" or isinstance(value, str):
            codec.check_text(value, field.name)


def _append_all(
    connection: sqlite3.Connection, commits: Sequence[_Commit], in_use: Collection[str]
) -> dict[int, PensieveError]:
    refused: dict[int, PensieveError] = {}
    for index, commit in enumerate(commits):
        field = f"turns[{index}]"
        if commit.conversation_id:
            _append(connection, commit, field, in_use)
        elif commit.refusal is not None:
            refused[index] = commit.refusal
        else:
            connection.execute("SAVEPOINT placed")
            try:
                _append(connection, commit, field, in_use)
            except PensieveError as error:
                connection.execute("ROLLBACK TO placed")
                refused[index] = error
            connection.execute("RELEASE placed")
    return refused


def _append(connection: sqlite3.Connection, commit: _Commit, field: str, in_use: Collection[str]) -> None:
    if commit.conversation_id:
        named_conversations.append(connection, commit.conversation_id, commit.row, field)
        return
    row = turns_table.insert_placed(connection, commit.row, field)
    if commit.draft is not None:
        responses_table.complete(connection, commit.draft, commit.items, row, in_use)


def _apply(connection: sqlite3.Connection, change: HistoryChange, in_use: Collection[str]) -> None:
    match change:
        case QueueResponse():
            responses_table.queue(connection, change)
        case EndResponse():
            responses_table.end(connection, change, in_use)
        case DeleteResponse():
            responses_table.delete(connection, change, in_use)
        case Expire():
            responses_table.expire(connection, change, in_use)
        case CreateConversation():
            server_conversations.create(connection, change)
        case UpdateConversation():
            server_conversations.update(connection, change)
        case DeleteConversation():
            server_conversations.delete(connection, change, in_use)
        case AppendItems():
            server_conversations.append_items(connection, change)
        case DeleteItem():
            server_conversations.delete_item(connection, change, in_use)


def _keep_note(connection: sqlite3.Connection, key: str, text: str | None) -> None:
    connection.execute("DELETE FROM meta WHERE key = ?", (key,))
    if text is not None:
        connection.execute("INSERT INTO meta VALUES (?, ?)", (key, text))
