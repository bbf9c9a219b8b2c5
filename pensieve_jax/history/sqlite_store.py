"""The history store on SQLite, in a file or in memory.

Owns: the transactions and queries of `HistoryStore`, the lock on the file, and one connection.
Does not know: the file's schema history and damage (`database`), how a turn is packed (`codec`), jax.
Called by: `assembly`, which opens it, and the engine.

Durability: the file is in write-ahead mode. With `synchronous="normal"` a committed turn survives `kill -9`,
since its bytes are with the kernel; a power loss may take the last commits but never half of one. With "full"
each commit waits for the disk and survives that too.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pensieve_jax.core.errors import (
    ConfigError,
    HistoryCorruptError,
    HistoryError,
    InvalidRequestError,
    UnknownConversationError,
)
from pensieve_jax.history import codec, database
from pensieve_jax.history.lock import FileLock
from pensieve_jax.history.store import CUT_FINISH_REASON, ConversationInfo, ConversationRecord, TurnRecord

_INFO_COLUMNS = "conversation_id, num_tokens, num_turns, last_active_s"
_TURN_COLUMNS = (
    "conversation_id, turn_index, prompt_ids, output_ids, seed, finish_reason, created_at_s, messages, "
    "output_text, checksum"
)
_NOTES = "note:"  # before the names of notes among the keys of `meta`


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
    ) -> None:
        """Open or make the history at `path` (None: in memory), read it through once, and lock it.

        Args:
          path: the file; its directory must exist. Beside it live `<name>.lock` and, while open, SQLite's
            `<name>-wal` and `<name>-shm`.
          fingerprint: who writes, from `history_fingerprint`; a file by anyone else is refused.
          synchronous: "normal" is safe against `kill -9`, "full" against power loss too (one fsync a commit).

        Raises:
          HistoryMismatchError: written by another model, tokenizer, version or application, or no database
            at all; left as it is.
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
        """All conversations, the most recently active first, equal times by id."""
        query = f"SELECT {_INFO_COLUMNS} FROM conversations ORDER BY last_active_s DESC, conversation_id"
        rows = self._run(lambda connection: connection.execute(query).fetchall())
        return [ConversationInfo(*row) for row in rows]

    def info(self, conversation_id: str) -> ConversationInfo:
        """A conversation's line of the listing, read without its tokens."""
        return self._run(lambda connection: _find(connection, conversation_id))

    def load(self, conversation_id: str) -> ConversationRecord:
        """Read a whole conversation; also raises HistoryCorruptError if its tokens are damaged."""
        info, rows = self._run(lambda connection: _read(connection, conversation_id))
        turns = tuple(codec.unpack_turn(row) for row in rows)
        token_ids = codec.unpack_token_ids(b"".join(packed for row in rows for packed in row[2:4]))
        in_order = all(turn.turn_index == index for index, turn in enumerate(turns))
        if not in_order or len(turns) != info.num_turns or len(token_ids) != info.num_tokens:
            raise HistoryCorruptError(
                f"Conversation {conversation_id!r} is damaged: it should hold {info.num_turns} turns of "
                f"{info.num_tokens} tokens, but {len(turns)} turns of {len(token_ids)} tokens were found. "
                "End it; the other conversations are good."
            )
        return ConversationRecord(conversation_id, token_ids, turns, info.last_active_s)

    def commit(self, turns: Sequence[TurnRecord]) -> None:
        """Append finished turns in one transaction: all of them or none."""
        rows = [codec.pack_turn(turn, f"turns[{index}]") for index, turn in enumerate(turns)]
        if not rows:
            return
        self._transact(lambda connection: _append_all(connection, rows))

    def truncate(self, conversation_id: str, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens; `HistoryStore.truncate` says what becomes of a cut turn."""
        return self._transact(lambda connection: _truncate(connection, conversation_id, num_tokens))

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation; its space in the file is used again by later ones."""
        self._transact(lambda connection: _delete(connection, conversation_id))

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


def _keep_note(connection: sqlite3.Connection, key: str, text: str | None) -> None:
    connection.execute("DELETE FROM meta WHERE key = ?", (key,))
    if text is not None:
        connection.execute("INSERT INTO meta VALUES (?, ?)", (key, text))


def _read(connection: sqlite3.Connection, conversation_id: str) -> tuple[ConversationInfo, list[Any]]:
    info = _find(connection, conversation_id)
    query = f"SELECT {_TURN_COLUMNS} FROM turns WHERE conversation_id = ? ORDER BY turn_index"
    return info, connection.execute(query, (conversation_id,)).fetchall()


def _find(connection: sqlite3.Connection, conversation_id: str) -> ConversationInfo:
    query = f"SELECT {_INFO_COLUMNS} FROM conversations WHERE conversation_id = ?"
    row = connection.execute(query, (conversation_id,)).fetchone()
    if row is None:
        raise UnknownConversationError(conversation_id)
    return ConversationInfo(*row)


def _append_all(connection: sqlite3.Connection, rows: Sequence[codec.TurnRow]) -> None:
    for index, row in enumerate(rows):
        _append(connection, row, f"turns[{index}].turn_index")


def _append(connection: sqlite3.Connection, row: codec.TurnRow, field: str) -> None:
    conversation_id, turn_index, prompt, output, *_ = row
    known = connection.execute(
        "SELECT num_turns FROM conversations WHERE conversation_id = ?", (conversation_id,)
    ).fetchone()
    next_index = known[0] if known else 0
    if turn_index != next_index:
        raise InvalidRequestError(field, turn_index, f"{next_index}, the next turn of {conversation_id!r}")
    connection.execute(f"INSERT INTO turns({_TURN_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    num_tokens = (len(prompt) + len(output)) // codec.TOKEN_BYTES
    connection.execute(
        "INSERT INTO conversations VALUES (?, ?, 1, ?) ON CONFLICT(conversation_id) DO UPDATE SET "
        "num_tokens = num_tokens + excluded.num_tokens, num_turns = num_turns + 1, "
        "last_active_s = excluded.last_active_s",
        (conversation_id, num_tokens, row[6]),
    )


def _truncate(connection: sqlite3.Connection, conversation_id: str, num_tokens: int) -> int:
    info = _find(connection, conversation_id)
    limit = f"an int from 0 to the {info.num_tokens} tokens of conversation {conversation_id!r}"
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer):
        raise InvalidRequestError("num_tokens", num_tokens, limit)
    if not 0 <= num_tokens <= info.num_tokens:
        raise InvalidRequestError("num_tokens", num_tokens, limit)
    return _cut(connection, conversation_id, int(num_tokens))


def _delete(connection: sqlite3.Connection, conversation_id: str) -> None:
    _find(connection, conversation_id)
    connection.execute("DELETE FROM turns WHERE conversation_id = ?", (conversation_id,))
    connection.execute("DELETE FROM conversations WHERE conversation_id = ?", (conversation_id,))


def _cut(connection: sqlite3.Connection, conversation_id: str, num_tokens: int) -> int:
    """Returns the number of turns left."""
    sizes = connection.execute(
        f"SELECT turn_index, length(prompt_ids) / {codec.TOKEN_BYTES}, length(output_ids) / "
        f"{codec.TOKEN_BYTES} "
        "FROM turns WHERE conversation_id = ? ORDER BY turn_index",
        (conversation_id,),
    ).fetchall()
    num_turns, num_tokens_before = 0, 0
    for turn_index, prompt_len, output_len in sizes:
        if num_tokens_before >= num_tokens:
            break
        num_turns = turn_index + 1
        num_tokens_kept = num_tokens - num_tokens_before
        if num_tokens_kept < prompt_len + output_len:
            _cut_turn(connection, conversation_id, turn_index, num_tokens_kept)
        num_tokens_before += prompt_len + output_len
    connection.execute(
        "DELETE FROM turns WHERE conversation_id = ? AND turn_index >= ?", (conversation_id, num_turns)
    )
    connection.execute(
        "UPDATE conversations SET num_tokens = ?, num_turns = ? WHERE conversation_id = ?",
        (num_tokens, num_turns, conversation_id),
    )
    return num_turns


def _cut_turn(
    connection: sqlite3.Connection, conversation_id: str, turn_index: int, num_tokens_kept: int
) -> None:
    row = connection.execute(
        f"SELECT {_TURN_COLUMNS} FROM turns WHERE conversation_id = ? AND turn_index = ?",
        (conversation_id, turn_index),
    ).fetchone()
    codec.unpack_turn(row)  # a damaged turn must not get a fresh checksum
    prompt, output, messages = row[2], row[3], row[7]
    kept_bytes = num_tokens_kept * codec.TOKEN_BYTES
    if kept_bytes < len(prompt):
        prompt, output, messages = prompt[:kept_bytes], b"", None
    else:
        output = output[: kept_bytes - len(prompt)]
    connection.execute(
        "UPDATE turns SET prompt_ids = ?, output_ids = ?, messages = ?, output_text = NULL, finish_reason = "
        "?, "
        "checksum = ? WHERE conversation_id = ? AND turn_index = ?",
        (
            *(prompt, output, messages, CUT_FINISH_REASON),
            *(codec.checksum(prompt, output), conversation_id, turn_index),
        ),
    )
