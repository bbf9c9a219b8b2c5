"""The conversations that callers of the library name. Each name refers to the turn at its head.

Owns: the statements on rows of `conversations` without metadata, all of owner "".
Does not know: transactions (the caller holds one), or a server's conversations (`server_conversations`).

A head moves by compare and swap: a move names the expected head, and nothing is changed if the head is
another one by then.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection
from typing import Final, NamedTuple

from pensieve_jax.core.errors import (
    ConversationChangedError,
    HistoryCorruptError,
    InvalidRequestError,
    PensieveError,
    UnknownConversationError,
)
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import turns_table
from pensieve_jax.history.codec import TurnRow
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.store import ConversationInfo, ConversationRecord, Cut

_INFO: Final = "SELECT conversation_id, num_tokens, num_turns, last_active_s FROM conversations"
_NAMED: Final = "owner = '' AND metadata IS NULL"
_THIS: Final = f"{_NAMED} AND conversation_id = ?"
_BEGIN: Final = (
    "INSERT INTO conversations VALUES ('', ?, ?, 1, NULL, ?, ?, ?, 1) "
    "ON CONFLICT (owner, conversation_id) DO UPDATE SET head_turn = excluded.head_turn, "
    "version = conversations.version + 1, last_active_s = excluded.last_active_s, "
    "num_tokens = excluded.num_tokens, num_turns = 1 "
    "WHERE conversations.metadata IS NULL AND conversations.head_turn IS NULL"
)
_MOVE: Final = (
    "UPDATE conversations SET head_turn = ?, version = version + 1, last_active_s = ?, "
    f"num_tokens = {{num_kept}} + ?, num_turns = num_turns + 1 WHERE {_THIS} AND num_turns = ? "
    "AND head_turn = ?"
)
_MAX_VALUES: Final = 1000  # per statement


class _Head(NamedTuple):
    """The head of a conversation, and the size of the path to it."""

    head_turn: str | None
    num_turns: int
    num_tokens: int


def listing(connection: Connection) -> list[ConversationInfo]:
    """Return all named conversations, the most recently active first, equal times by id."""
    query = f"{_INFO} WHERE {_NAMED} ORDER BY last_active_s DESC, conversation_id"
    return [ConversationInfo(*row) for row in connection.execute(query)]


def idle(
    connection: Connection, before_s: float | None, num_kept: int | None, busy: Collection[str]
) -> list[str]:
    """Return the conversations of `HistoryStore.idle`: idle since `before_s`, or too many."""
    found = [] if num_kept is None else _behind(connection, min(num_kept, sys.maxsize), busy)
    if before_s is not None:
        query = f"SELECT conversation_id FROM conversations WHERE {_NAMED} AND last_active_s < ?"
        found += (row[0] for row in connection.execute(query, (before_s,)))
    return [conversation_id for conversation_id in dict.fromkeys(found) if conversation_id not in busy]


def _behind(connection: Connection, num_kept: int, busy: Collection[str]) -> list[str]:
    """Return the idle conversations after the first `num_kept` idle ones.

    They are among those after the first `num_kept` of all, so only these are listed.
    """
    query = (
        f"SELECT conversation_id FROM conversations WHERE {_NAMED} "
        f"ORDER BY last_active_s DESC, conversation_id LIMIT {sys.maxsize} OFFSET ?"
    )
    behind = [row[0] for row in connection.execute(query, (num_kept,))]
    idle_behind = [conversation_id for conversation_id in behind if conversation_id not in busy]
    if not idle_behind:
        return []
    num_busy_before = 0
    for names in itertools.batched(set(busy).difference(behind), _MAX_VALUES):
        places = ", ".join("?" * len(names))
        query = f"SELECT count(*) FROM conversations WHERE {_NAMED} AND conversation_id IN ({places})"
        num_busy_before += connection.execute(query, names).fetchone()[0]
    return idle_behind[num_busy_before:]


def info(connection: Connection, conversation_id: str) -> ConversationInfo:
    """Return one line of the listing; raise UnknownConversationError."""
    row = connection.execute(f"{_INFO} WHERE {_THIS}", (conversation_id,)).fetchone()
    if row is None:
        raise UnknownConversationError(conversation_id)
    return ConversationInfo(*row)


def read(connection: Connection, conversation_id: str) -> tuple[ConversationInfo, list[TurnRow]]:
    """Return a conversation's line and its turns; raise UnknownConversationError."""
    found = info(connection, conversation_id)
    return found, turns_table.path_rows(connection, "", _existing(connection, conversation_id).head_turn)


def unpack(info: ConversationInfo, rows: list[TurnRow]) -> ConversationRecord:
    """Return the record for `HistoryStore.load`; raise HistoryCorruptError for damaged or missing tokens."""
    conversation_id = info.conversation_id
    turns, token_ids = turns_table.unpack_rows(rows, conversation_id)
    whole = len(turns) == info.num_turns and len(token_ids) == info.num_tokens
    if not whole or not turns_table.in_order(turns):
        raise HistoryCorruptError(
            f"Conversation {conversation_id!r} is damaged: it should hold {info.num_turns} turns of "
            f"{info.num_tokens} tokens, but {len(turns)} turns of {len(token_ids)} tokens were found. "
            "End it; the other conversations are good."
        )
    return ConversationRecord(conversation_id, token_ids, turns, info.last_active_s)


def head(connection: Connection, conversation_id: str) -> str | None:
    """Return the head turn, or None for an empty conversation; raise UnknownConversationError."""
    return _existing(connection, conversation_id).head_turn


def append(connection: Connection, conversation_id: str, row: TurnRow, keep: int | None, field: str) -> None:
    """Add a turn at the end of a conversation. A turn with an id must continue the current head.

    It follows the first `keep` tokens of the conversation, or all of them for None.
    Raises ConversationChangedError if it continues another turn, and InvalidRequestError unless a turn
    without an id has the next number.
    """
    row = row._replace(owner="")
    if not row.turn_id:
        before = _find(connection, conversation_id) or _Head(None, 0, 0)
        if row.turn_index != before.num_turns:
            limit = f"{before.num_turns}, the next turn of {conversation_id!r}"
            raise InvalidRequestError(f"{field}.turn_index", row.turn_index, limit)
        row = row._replace(turn_id=new_turn_id(before.head_turn), parent_id=before.head_turn)
    if row.parent_id is None:
        statement = _BEGIN
        values: tuple[object, ...] = (
            *(conversation_id, row.turn_id, row.created_at_s, row.created_at_s, row.num_tokens),
        )
    else:
        place = (conversation_id, row.turn_index, row.parent_id)
        statement = _MOVE.format(num_kept="num_tokens" if keep is None else "0")
        values = (row.turn_id, row.created_at_s, (keep or 0) + row.num_tokens, *place)
    connection.execute_changing(statement, values, lambda: _not_moved(connection, conversation_id, field))
    turns_table.insert_placed(connection, row, keep, field)


def _not_moved(connection: Connection, conversation_id: str, field: str) -> PensieveError:
    query = "SELECT 1 FROM conversations WHERE owner = '' AND conversation_id = ? AND metadata IS NOT NULL"
    if connection.execute(query, (conversation_id,)).fetchone() is None:
        return ConversationChangedError(conversation_id)
    limit = "another name: a server's conversation has this one"
    return InvalidRequestError(f"{field}.conversation_id", conversation_id, limit)


def truncate(connection: Connection, conversation_id: str, num_tokens: int) -> Cut:
    """Move a head back. See `HistoryStore.truncate`."""
    before = _existing(connection, conversation_id)
    num_tokens = turns_table.check_cut(num_tokens, before.num_tokens, conversation_id)
    last, num_turns = turns_table.cut(connection, before.head_turn, num_tokens, conversation_id)
    return _move_back(connection, conversation_id, before, Cut(num_turns, last, before.head_turn, num_tokens))


def truncate_turns(connection: Connection, conversation_id: str, num_turns: int) -> Cut:
    """Move a head back to the end of a turn. See `HistoryStore.truncate_turns`."""
    before = _existing(connection, conversation_id)
    if (
        isinstance(num_turns, bool)
        or not isinstance(num_turns, int)
        or not 0 <= num_turns <= before.num_turns
    ):
        limit = f"an int from 0 to the {before.num_turns} turns of conversation {conversation_id!r}"
        raise InvalidRequestError("num_turns", num_turns, limit)
    last, num_tokens = turns_table.turn_end(connection, before.head_turn, num_turns)
    return _move_back(connection, conversation_id, before, Cut(num_turns, last, before.head_turn, num_tokens))


def _move_back(connection: Connection, conversation_id: str, before: _Head, cut: Cut) -> Cut:
    """Move a head to an earlier turn and remove the turns that become unneeded."""
    connection.execute_changing(
        "UPDATE conversations SET head_turn = ?, num_tokens = ?, num_turns = ?, version = version + 1 "
        f"WHERE {_THIS} AND coalesce(head_turn, '') = ?",
        (cut.head, cut.num_tokens, cut.num_turns, conversation_id, before.head_turn or ""),
        lambda: ConversationChangedError(conversation_id),
    )
    turns_table.collect(connection, "", before.head_turn)
    return cut


def fork(
    connection: Connection,
    conversation_id: str,
    new_conversation_id: str,
    num_tokens: int | None,
    at_s: float | None,
) -> Cut:
    """Give a part of a path a new name, which must be text. See `HistoryStore.fork`."""
    source = _existing(connection, conversation_id)
    taken = "SELECT 1 FROM conversations WHERE owner = '' AND conversation_id = ?"
    if not new_conversation_id or connection.execute(taken, (new_conversation_id,)).fetchone():
        limit = "a non-empty string that is not the name of a conversation"
        raise InvalidRequestError("new_conversation_id", new_conversation_id, limit)
    if num_tokens is None:
        num_tokens = source.num_tokens
    num_tokens = turns_table.check_cut(num_tokens, source.num_tokens, conversation_id)
    last, num_turns = turns_table.cut(connection, source.head_turn, num_tokens, conversation_id)
    connection.execute(
        "INSERT INTO conversations SELECT '', ?, ?, 1, NULL, created_at_s, coalesce(?, last_active_s), ?, ? "
        f"FROM conversations WHERE {_THIS}",
        (new_conversation_id, last, at_s, num_tokens, num_turns, conversation_id),
    )
    return Cut(num_turns, last, source.head_turn, num_tokens)


def delete(connection: Connection, conversation_id: str) -> None:
    """Forget a name and the turns that only it needs; raise UnknownConversationError."""
    before = _existing(connection, conversation_id)
    connection.execute(f"DELETE FROM conversations WHERE {_THIS}", (conversation_id,))
    turns_table.collect(connection, "", before.head_turn)


def _find(connection: Connection, conversation_id: str) -> _Head | None:
    query = f"SELECT head_turn, num_turns, num_tokens FROM conversations WHERE {_THIS}"
    row = connection.execute(query, (conversation_id,)).fetchone()
    return None if row is None else _Head._make(row)


def _existing(connection: Connection, conversation_id: str) -> _Head:
    found = _find(connection, conversation_id)
    if found is None:
        raise UnknownConversationError(conversation_id)
    return found
