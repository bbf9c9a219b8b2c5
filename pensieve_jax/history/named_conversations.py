"""The conversations that callers of the library name: each a name for the turn at its head.

Owns: the statements on rows of `conversations` without metadata, all of owner "".
Does not know: transactions (the caller holds one), or a server's conversations (`server_conversations`).
Called by: `sqlite_store`.
"""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from pensieve_jax.core.errors import HistoryCorruptError, InvalidRequestError, UnknownConversationError
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import codec, turns_table
from pensieve_jax.history.codec import TurnRow
from pensieve_jax.history.store import ConversationInfo, ConversationRecord

_INFO: Final = "SELECT conversation_id, num_tokens, num_turns, last_active_s FROM conversations"
_NAMED: Final = "owner = '' AND metadata IS NULL"
_THIS: Final = f"{_NAMED} AND conversation_id = ?"


class _Head(NamedTuple):
    """Where a conversation stands."""

    head_turn: str | None
    num_turns: int
    num_tokens: int


def listing(connection: sqlite3.Connection) -> list[ConversationInfo]:
    """All of them, the most recently active first, equal times by id."""
    query = f"{_INFO} WHERE {_NAMED} ORDER BY last_active_s DESC, conversation_id"
    return [ConversationInfo(*row) for row in connection.execute(query)]


def info(connection: sqlite3.Connection, conversation_id: str) -> ConversationInfo:
    """One line of the listing; raises UnknownConversationError."""
    row = connection.execute(f"{_INFO} WHERE {_THIS}", (conversation_id,)).fetchone()
    if row is None:
        raise UnknownConversationError(conversation_id)
    return ConversationInfo(*row)


def read(connection: sqlite3.Connection, conversation_id: str) -> tuple[ConversationInfo, list[TurnRow]]:
    """A conversation's line and its turns; raises UnknownConversationError."""
    found = info(connection, conversation_id)
    return found, turns_table.path_rows(connection, "", _existing(connection, conversation_id).head_turn)


def unpack(found: ConversationInfo, rows: list[TurnRow]) -> ConversationRecord:
    """What `HistoryStore.load` returns; raises HistoryCorruptError if tokens are damaged or missing."""
    conversation_id = found.conversation_id
    turns = tuple(codec.unpack_turn(row, conversation_id) for row in rows)
    token_ids = codec.unpack_token_ids(turns_table.joined_ids(rows))
    whole = len(turns) == found.num_turns and len(token_ids) == found.num_tokens
    if not whole or not turns_table.in_order(turns):
        raise HistoryCorruptError(
            f"Conversation {conversation_id!r} is damaged: it should hold {found.num_turns} turns of "
            f"{found.num_tokens} tokens, but {len(turns)} turns of {len(token_ids)} tokens were found. "
            "End it; the other conversations are good."
        )
    return ConversationRecord(conversation_id, token_ids, turns, found.last_active_s)


def append(connection: sqlite3.Connection, conversation_id: str, row: TurnRow, field: str) -> None:
    """Add a turn behind the last one; raises InvalidRequestError unless it has the next number."""
    before = _find(connection, conversation_id) or _Head(None, 0, 0)
    if row.turn_index != before.num_turns:
        limit = f"{before.num_turns}, the next turn of {conversation_id!r}"
        raise InvalidRequestError(f"{field}.turn_index", row.turn_index, limit)
    num_tokens, turn_id = before.num_tokens + row.num_tokens, new_turn_id(before.head_turn)
    turns_table.insert(
        connection,
        row._replace(owner="", turn_id=turn_id, parent_id=before.head_turn, num_tokens=num_tokens),
    )
    done = connection.execute(
        "INSERT INTO conversations VALUES ('', ?, ?, 1, NULL, ?, ?, ?, 1) "
        "ON CONFLICT(owner, conversation_id) DO UPDATE SET head_turn = excluded.head_turn, "
        "version = version + 1, last_active_s = excluded.last_active_s, num_tokens = excluded.num_tokens, "
        "num_turns = num_turns + 1 WHERE metadata IS NULL",
        (conversation_id, turn_id, row.created_at_s, row.created_at_s, num_tokens),
    )
    if not done.rowcount:
        limit = "another name: a server's conversation has this one"
        raise InvalidRequestError(f"{field}.conversation_id", conversation_id, limit)


def truncate(connection: sqlite3.Connection, conversation_id: str, num_tokens: int) -> int:
    """Move a head back; returns the number of turns left. See `HistoryStore.truncate`."""
    before = _existing(connection, conversation_id)
    num_tokens = turns_table.check_cut(num_tokens, before.num_tokens, conversation_id)
    head, num_turns = turns_table.cut(connection, before.head_turn, num_tokens, conversation_id)
    connection.execute(
        f"UPDATE conversations SET head_turn = ?, num_tokens = ?, num_turns = ?, version = version + 1 "
        f"WHERE {_THIS}",
        (head, num_tokens, num_turns, conversation_id),
    )
    turns_table.collect(connection, "", before.head_turn)
    return num_turns


def fork(
    connection: sqlite3.Connection, conversation_id: str, new_conversation_id: str, num_tokens: int | None
) -> int:
    """Another name for a part of a path; returns its number of turns. See `HistoryStore.fork`."""
    codec.check_text(new_conversation_id, "new_conversation_id")
    source = _existing(connection, conversation_id)
    taken = "SELECT 1 FROM conversations WHERE owner = '' AND conversation_id = ?"
    if not new_conversation_id or connection.execute(taken, (new_conversation_id,)).fetchone():
        limit = "a non-empty string that no conversation is named by"
        raise InvalidRequestError("new_conversation_id", new_conversation_id, limit)
    if num_tokens is None:
        num_tokens = source.num_tokens
    num_tokens = turns_table.check_cut(num_tokens, source.num_tokens, conversation_id)
    head, num_turns = turns_table.cut(connection, source.head_turn, num_tokens, conversation_id)
    connection.execute(
        "INSERT INTO conversations SELECT '', ?, ?, 1, NULL, created_at_s, last_active_s, ?, ? "
        f"FROM conversations WHERE {_THIS}",
        (new_conversation_id, head, num_tokens, num_turns, conversation_id),
    )
    return num_turns


def delete(connection: sqlite3.Connection, conversation_id: str) -> None:
    """Forget a name, and what nothing else needs; raises UnknownConversationError."""
    before = _existing(connection, conversation_id)
    connection.execute(f"DELETE FROM conversations WHERE {_THIS}", (conversation_id,))
    turns_table.collect(connection, "", before.head_turn)


def _find(connection: sqlite3.Connection, conversation_id: str) -> _Head | None:
    query = f"SELECT head_turn, num_turns, num_tokens FROM conversations WHERE {_THIS}"
    row = connection.execute(query, (conversation_id,)).fetchone()
    return None if row is None else _Head._make(row)


def _existing(connection: sqlite3.Connection, conversation_id: str) -> _Head:
    head = _find(connection, conversation_id)
    if head is None:
        raise UnknownConversationError(conversation_id)
    return head
