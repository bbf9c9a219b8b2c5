"""The conversations and items of a server's clients.

Owns: the statements on `items` and on rows of `conversations` with metadata, and the item of a reply.
Does not know: transactions (the caller holds one), what a client may put into an item, or HTTP.

The head of such a conversation is the turn that was last appended to it; the head keeps the turn's tokens
while the conversation exists. Which turn the next one continues depends on the items' contents, not on the
head.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Sequence
from typing import Final

from pensieve_jax.core.errors import (
    ConversationChangedError,
    InvalidRequestError,
    PensieveError,
    UnknownRecordError,
)
from pensieve_jax.core.template_input import NO_INPUT
from pensieve_jax.history import codec, turns_table
from pensieve_jax.history.codec import TurnRow
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.server_tables import idempotency_table
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    ConversationAppend,
    ConversationRow,
    CreateConversation,
    DeleteConversation,
    DeleteItem,
    Expire,
    ItemRow,
    UpdateConversation,
)
from pensieve_jax.history.server_tables.reply_items import reply_items
from pensieve_jax.history.store import TurnKey

ROW: Final = "SELECT conversation_id, owner, version, metadata, created_at_s FROM conversations"
THIS: Final = "owner = ? AND conversation_id = ? AND metadata IS NOT NULL"
ITEM: Final = "SELECT item_id, position, item FROM items"
_log = logging.getLogger(__name__)
MAX_DELETED_ITEMS: Final = 100
MAX_DELETED_CHARACTERS: Final = 2**20
"""Limits of one change, so that it does not block the engine's thread; a longer item is deleted alone."""

_RELEASE_HEAD: Final = (
    f"INSERT INTO released SELECT owner, head_turn FROM conversations WHERE {THIS} "
    "AND head_turn IS NOT NULL AND head_turn <> ? ON CONFLICT DO NOTHING"
)
_ADVANCE: Final = f"UPDATE conversations SET version = version + 1 WHERE {THIS} AND version = ?"
_CLEAR_HEAD: Final = f"UPDATE conversations SET version = version + 1, head_turn = NULL WHERE {THIS}"
_MOVE_HEAD: Final = (
    "UPDATE conversations SET head_turn = ?, last_active_s = ?, num_turns = num_turns + 1, "
    f"num_tokens = (SELECT num_tokens FROM turns WHERE owner = ? AND turn_id = ?) WHERE {THIS}"
)
_INSERT_ITEM: Final = (
    "INSERT INTO items SELECT ?, ?, coalesce(max(position) + 1, 0), ?, ? FROM items "
    "WHERE owner = ? AND conversation_id = ? ON CONFLICT DO NOTHING"
)

type Item = tuple[str, str]  # id, JSON


def parse_items(items: str, field: str) -> list[Item]:
    """Split a JSON list into items; raise InvalidRequestError unless each is an object with an id."""
    try:
        parsed = json.loads(items)
    except ValueError as error:
        raise InvalidRequestError(field, items, f"a JSON list ({error})") from error
    if not isinstance(parsed, list):
        raise InvalidRequestError(field, items, "a JSON list")
    for position, item in enumerate(parsed):
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            raise InvalidRequestError(f"{field}[{position}]", item, "an object with an id")
    return [(item["id"], json.dumps(item, separators=(",", ":"))) for item in parsed]


def packed_reply(item_id: str, row: TurnRow) -> list[Item]:
    """Return a turn's reply as items of the Conversations API; `item_id` is "msg_" and the turn's id."""
    status = "completed" if row.finish_reason == "stop" else "incomplete"
    _, template_input = codec.unpack_messages(row.messages)
    turn_id, text = item_id.removeprefix("msg_"), row.output_text or ""
    try:
        items = reply_items(turn_id, text, template_input, status)
    except Exception:  # a defect of a parser must cost neither the turn nor the engine
        _log.exception("The reply of turn %s could not be divided; it is stored as text.", turn_id)
        items = reply_items(turn_id, text, NO_INPUT, status)
    return [(item["id"], json.dumps(item, separators=(",", ":"))) for item in items]


def find(connection: Connection, owner: str, conversation_id: str) -> ConversationRow:
    """Return a conversation; raise UnknownRecordError."""
    row = connection.execute(f"{ROW} WHERE {THIS}", (owner, conversation_id)).fetchone()
    if row is None:
        raise UnknownRecordError("conversation", conversation_id)
    return ConversationRow(
        conversation_id=row[0], owner=row[1], version=row[2], metadata=row[3], created_at_s=row[4]
    )


def find_item(connection: Connection, owner: str, conversation_id: str, item_id: str) -> ItemRow:
    """Return an item; raise UnknownRecordError for it or for the conversation."""
    find(connection, owner, conversation_id)
    query = f"{ITEM} WHERE owner = ? AND conversation_id = ? AND item_id = ?"
    row = connection.execute(query, (owner, conversation_id, item_id)).fetchone()
    if row is None:
        raise UnknownRecordError("item", item_id)
    return ItemRow(item_id=row[0], position=row[1], item=row[2])


def create(connection: Connection, change: CreateConversation) -> None:
    """Create a conversation with its first items.

    Raises InvalidRequestError for an id or an idempotency key that is taken.
    """
    key = (change.owner, change.conversation_id)
    limit = "an id that no conversation has"
    connection.execute_changing(
        "INSERT INTO conversations VALUES (?, ?, NULL, 0, ?, ?, ?, 0, 0) ON CONFLICT DO NOTHING",
        (*key, change.metadata, change.created_at_s, change.created_at_s),
        lambda: InvalidRequestError("conversation_id", change.conversation_id, limit),
    )
    _insert_items(connection, key, parse_items(change.items, "items"))
    if change.idempotency is not None:
        idempotency_table.check(change.idempotency, "idempotency")
        idempotency_table.keep(
            connection,
            change.owner,
            change.idempotency,
            change.conversation_id,
            change.created_at_s,
            idempotency_table.NEW_CONVERSATION,
        )


def update(connection: Connection, change: UpdateConversation) -> None:
    """Replace the metadata. The version stays, so that a running turn of the conversation is not refused."""
    find(connection, change.owner, change.conversation_id)
    connection.execute(
        f"UPDATE conversations SET metadata = ? WHERE {THIS}",
        (change.metadata, change.owner, change.conversation_id),
    )
    touch(connection, (change.owner, change.conversation_id), change.updated_at_s)


def delete(connection: Connection, change: DeleteConversation, in_use: Collection[str]) -> list[TurnKey]:
    """Delete a conversation, or as much of it as one change may: its first items, and its head.

    Returns removed turns.
    """
    key = (change.owner, change.conversation_id)
    head = _head(connection, key)
    last = _last_of_a_portion(connection, key)
    items = "DELETE FROM items WHERE owner = ? AND conversation_id = ?"
    if last is None:
        connection.execute(items, key)
        connection.execute(f"DELETE FROM conversations WHERE {THIS}", key)
        idempotency_table.forget_conversation(connection, *key)
        idempotency_table.forget(connection, *key)
    else:
        connection.execute(f"{items} AND position <= ?", (*key, last))
        connection.execute(_CLEAR_HEAD, key)
    return turns_table.collect(connection, change.owner, head, in_use)


def expire(connection: Connection, change: Expire, in_use: Collection[str]) -> list[TurnKey]:
    """Delete the conversation that was idle for the longest time, if that was too long; return removed turns.

    A long conversation takes several changes.
    """
    found = first_idle(connection, change.now_s, change.idle_s, change.busy)
    if found is None:
        return []
    owner, conversation_id = found
    return delete(connection, DeleteConversation(owner=owner, conversation_id=conversation_id), in_use)


def first_idle(
    connection: Connection, now_s: float, idle_s: float | None, busy: Collection[tuple[str, str]]
) -> tuple[str, str] | None:
    """Return owner and id of a conversation that `expire` would delete, or None."""
    if idle_s is None:
        return None
    query = (
        "SELECT owner, conversation_id FROM conversations WHERE metadata IS NOT NULL AND last_active_s < ? "
        "ORDER BY last_active_s LIMIT ?"
    )
    rows = connection.execute(query, (now_s - idle_s, len(busy) + 1)).fetchall()
    return next((key for owner, name in rows if (key := (owner, name)) not in busy), None)


def append_items(connection: Connection, change: AppendItems) -> None:
    """Append items from a client, if nothing has changed since it read.

    Raises ConversationChangedError, and InvalidRequestError for an id or a key that is taken.
    """
    key = (change.owner, change.conversation_id)
    items = parse_items(change.items, "items")
    _advance(connection, key, change.expected_version)
    _insert_items(connection, key, items)
    touch(connection, key, change.appended_at_s)
    if change.idempotency is not None:
        idempotency_table.check(change.idempotency, "idempotency")
        idempotency_table.keep(
            connection, change.owner, change.idempotency, change.name, change.appended_at_s, key[1]
        )


def delete_item(connection: Connection, change: DeleteItem, in_use: Collection[str]) -> list[TurnKey]:
    """Remove an item, and return removed turns.

    The conversation also releases its head, whose tokens may contain the item.
    """
    find_item(connection, change.owner, change.conversation_id, change.item_id)
    key = (change.owner, change.conversation_id)
    head = _head(connection, key)
    query = "DELETE FROM items WHERE owner = ? AND conversation_id = ? AND item_id = ?"
    connection.execute(query, (*key, change.item_id))
    connection.execute(_CLEAR_HEAD, key)
    return turns_table.collect(connection, change.owner, head, in_use)


def append_turn(
    connection: Connection,
    append: ConversationAppend,
    items: Sequence[Item],
    row: TurnRow,
) -> None:
    """Append a turn's items and make it the head; raise ConversationChangedError or UnknownRecordError.

    Unless the turn continues the previous head, that is recorded in `released`, for `collect_released`.
    """
    key = (row.owner, append.conversation_id)
    connection.execute(_RELEASE_HEAD, (*key, row.parent_id or ""))
    _advance(connection, key, append.expected_version)
    connection.execute(_MOVE_HEAD, (row.turn_id, row.created_at_s, row.owner, row.turn_id, *key))
    _insert_items(connection, key, items)


def check_version(connection: Connection, owner: str, append: ConversationAppend) -> None:
    """Raise ConversationChangedError or UnknownRecordError if a turn that appends could not be committed."""
    if find(connection, owner, append.conversation_id).version != append.expected_version:
        raise ConversationChangedError(append.conversation_id)


def _advance(connection: Connection, key: tuple[str, str], expected_version: int) -> None:
    """Compare and swap the version: a concurrent change waits for the first one, and then fails."""
    connection.execute_changing(_ADVANCE, (*key, expected_version), lambda: _changed(connection, key))


def touch(connection: Connection, key: tuple[str, str], at_s: float) -> None:
    """Store that a conversation was active at a time, unless it was active later."""
    connection.execute(
        f"UPDATE conversations SET last_active_s = ? WHERE {THIS} AND last_active_s < ?", (at_s, *key, at_s)
    )


def _changed(connection: Connection, key: tuple[str, str]) -> PensieveError:
    try:
        find(connection, *key)
    except UnknownRecordError as error:
        return error
    return ConversationChangedError(key[1])


def _head(connection: Connection, key: tuple[str, str]) -> str | None:
    row = connection.execute(f"SELECT head_turn FROM conversations WHERE {THIS}", key).fetchone()
    if row is None:
        raise UnknownRecordError("conversation", key[1])
    head: str | None = row[0]
    return head


def _last_of_a_portion(connection: Connection, key: tuple[str, str]) -> int | None:
    """Return the position of the last item that one change may delete; None if it may delete all."""
    query = (
        "SELECT position, length(item) FROM items WHERE owner = ? AND conversation_id = ? "
        "ORDER BY position LIMIT ?"
    )
    room, last = MAX_DELETED_CHARACTERS, None
    for index, (position, size) in enumerate(connection.execute(query, (*key, MAX_DELETED_ITEMS + 1))):
        if index == MAX_DELETED_ITEMS or (last is not None and size > room):
            return last
        room -= size
        last = position
    return None


def _insert_items(connection: Connection, key: tuple[str, str], items: Sequence[Item]) -> None:
    limit = "an id that no other item here has"
    for item_id, item in items:
        codec.check_text(item_id, "items.id")
        connection.execute_changing(
            _INSERT_ITEM,
            (*key, item_id, item, *key),
            functools.partial(InvalidRequestError, "items.id", item_id, limit),
        )
