"""A history as another process reads it while the engine's process writes.

Owns: what can be looked up, each under the owner whose it is.
Does not know: how anything comes to be written (`table_store`), which database has it (`opening`), or HTTP.

Each method sees one state of the history, whole commits only, and waits neither for the writer nor for
another reader. Whatever belongs to somebody is looked up together with its owner:
another owner's id is not found in the same words, and by the same search, as one that does not exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

from pensieve_jax.core.errors import InvalidRequestError, UnknownRecordError, UnknownTurnError
from pensieve_jax.core.outputs import Usage
from pensieve_jax.history import codec, opening, turns_table
from pensieve_jax.history import trees as response_trees
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.postgres_location import is_postgres
from pensieve_jax.history.server_tables import idempotency_table, responses_table, server_conversations
from pensieve_jax.history.server_tables.changes import ConversationRow, ItemRow, ResponseRecord
from pensieve_jax.text.messages import Message

type Order = Literal["asc", "desc"]

_ALL: Final = 2**62  # rows

_TURN: Final = (
    "SELECT turns.turn_id, turns.parent_id, turns.turn_index, turns.num_tokens, finish_reason, created_at_s, "
    "messages, output_text, output_ids, usage, chain FROM "
)


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn without the ids of its prompt.

    Attributes:
      turn_id, parent_id, turn_index: where it stands.
      num_tokens: of its path, up to its end.
      messages: its new chat messages; None for a turn that was sent as text or ids.
      output_text: None without a tokenizer.
      usage, chain: None and b"" where there is none.
    """

    turn_id: str
    parent_id: str | None
    turn_index: int
    num_tokens: int
    finish_reason: str
    created_at_s: float
    messages: tuple[Message, ...] | None
    output_text: str | None
    output_token_ids: tuple[int, ...]
    usage: Usage | None
    chain: bytes


@dataclass(frozen=True, slots=True)
class Page[T]:
    """A part of a list, and whether there is more behind it."""

    rows: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request that was sent with an idempotency key.

    Attributes:
      became: the id of its response, or the name under which its items were appended.
    """

    body_sha256: str
    became: str
    expires_at_s: float


class HistoryReader:
    """Reads a history in a file or in Postgres; safe to call from several threads.

    Attributes:
      is_far: whether reading waits for a server, which may be away.
      claims: what this server does and no other of the same history.
    """

    def __init__(self, history: str | os.PathLike[str], *, fingerprint: str) -> None:
        """Open a history that a writer has made, at a path or a URL.

        Raises HistoryError if it cannot be opened, HistoryMismatchError if it is not a history of this
        release and this model.
        """
        self._connections = opening.open_for_reading(history, fingerprint)
        self.is_far = is_postgres(history)
        self.claims = opening.claims_of(history)
        self._run = self._connections.run

    # Responses

    def response(self, owner: str, response_id: str) -> ResponseRecord:
        """A response in whatever state; raises UnknownRecordError."""
        return self._run(lambda connection: _response(connection, owner, response_id))

    def input_items(
        self,
        owner: str,
        response_id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> Page[ItemRow]:
        """The items of a response's own request; raises UnknownRecordError, for `after` as well."""
        items = json.loads(self.response(owner, response_id).input_items)
        rows = [
            ItemRow(item_id=item["id"], position=position, item=json.dumps(item, separators=(",", ":")))
            for position, item in enumerate(items)
        ]
        if order == "desc":
            rows.reverse()
        if after is not None:
            ids = [row.item_id for row in rows]
            if after not in ids:
                raise UnknownRecordError("item", after)
            rows = rows[ids.index(after) + 1 :]
        return Page(tuple(rows[:limit]), len(rows) > limit)

    def idempotent(
        self, owner: str, key: str, now_s: float, *, conversation_id: str | None = None
    ) -> KnownRequest | None:
        """The request that was sent with a key which is still kept.

        With `conversation_id` one that appended items there; else one that asked for a response.
        """
        row = self._run(
            lambda connection: idempotency_table.find(connection, owner, key, now_s, conversation_id)
        )
        return None if row is None else KnownRequest(*row)

    def by_body(self, owner: str, body_sha256: str, since_s: float) -> ResponseRecord | None:
        """The last response to a request with this digest, made since a time; none for an empty digest."""
        query = (
            f"{responses_table.RECORD} WHERE responses.owner = ? AND responses.body_sha256 = ? "
            "AND responses.body_sha256 <> '' AND responses.created_at_s >= ? "
            "ORDER BY responses.created_at_s DESC LIMIT 1"
        )
        values = (owner, body_sha256, since_s)
        row = self._run(lambda connection: connection.execute(query, values).fetchone())
        return None if row is None else responses_table.unpack(row)

    def has_expired(self, now_s: float) -> bool:
        """Whether an `Expire` would find a response or a key whose time has passed."""
        return self._run(lambda connection: responses_table.has_expired(connection, now_s))

    def unfinished_background(self) -> list[ResponseRecord]:
        """Every owner's queued responses with their jobs, in the order in which they came."""
        query = (
            f"{responses_table.RECORD} WHERE responses.status = 'queued' "
            "ORDER BY responses.created_at_s, responses.rowid"
        )
        rows = self._run(lambda connection: connection.execute(query).fetchall())
        return [responses_table.unpack(row) for row in rows]

    # Conversations of a server

    def conversation(self, owner: str, conversation_id: str) -> ConversationRow:
        """A conversation; raises UnknownRecordError."""
        return self._run(lambda connection: server_conversations.find(connection, owner, conversation_id))

    def items(
        self,
        owner: str,
        conversation_id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> Page[ItemRow]:
        """A conversation's items; raises UnknownRecordError, for `after` as well."""
        rows = self._run(
            lambda connection: _items(connection, owner, conversation_id, after, limit + 1, order)
        )
        return Page(tuple(rows[:limit]), len(rows) > limit)

    def size_of_items(self, owner: str, conversation_id: str) -> tuple[int, int]:
        """How many items a conversation has, and of how many characters; raises UnknownRecordError."""

        def work(connection: Connection) -> tuple[int, int]:
            server_conversations.find(connection, owner, conversation_id)
            query = "SELECT count(*), coalesce(sum(length(item)), 0) FROM items"
            behind = "WHERE owner = ? AND conversation_id = ?"
            num_items, num_characters = connection.execute(
                f"{query} {behind}", (owner, conversation_id)
            ).fetchone()
            return num_items, num_characters

        return self._run(work)

    def all_items(self, owner: str, conversation_id: str) -> tuple[ConversationRow, tuple[ItemRow, ...]]:
        """A conversation and its items in order, of one moment: what a turn is made from."""

        def work(connection: Connection) -> tuple[ConversationRow, tuple[ItemRow, ...]]:
            found = server_conversations.find(connection, owner, conversation_id)
            return found, tuple(_items(connection, owner, conversation_id, None, _ALL, "asc"))

        return self._run(work)

    def item(self, owner: str, conversation_id: str, item_id: str) -> ItemRow:
        """An item of a conversation; raises UnknownRecordError for either."""
        return self._run(
            lambda connection: server_conversations.find_item(connection, owner, conversation_id, item_id)
        )

    # Trees of responses

    def trees(self, owner: str, limit: int = 100) -> list[response_trees.TreeSummary]:
        """An owner's trees of responses, the most recently active first."""
        return self._run(lambda connection: response_trees.trees(connection, owner, limit))

    def tree(self, owner: str, root: str, limit: int = 1000) -> list[response_trees.TreeTurn]:
        """The last responses of a tree in the order in which they were made; empty where there is none.

        Long ones make them fewer; see `trees.MAX_TREE_CHARACTERS`.
        """
        return self._run(lambda connection: response_trees.tree(connection, owner, root, limit))

    # Turns

    def turn(self, owner: str, turn_id: str) -> TurnView:
        """A turn; raises UnknownTurnError."""
        query = f"{_TURN} turns WHERE owner = ? AND turn_id = ?"
        row = self._run(lambda connection: connection.execute(query, (owner, turn_id)).fetchone())
        if row is None:
            raise UnknownTurnError(turn_id)
        return _view(row)

    def has_turn(self, owner: str, turn_id: str) -> bool:
        """Whether there is such a turn."""
        return self._run(lambda connection: turns_table.exists(connection, owner, turn_id))

    def turn_path(self, owner: str, turn_id: str) -> tuple[TurnView, ...]:
        """The turns from the first of a tree to this one; raises UnknownTurnError."""
        query = f"{turns_table.PATH}{_TURN} path JOIN turns USING (owner, turn_id) ORDER BY turns.turn_index"
        rows = self._run(lambda connection: connection.execute(query, (owner, turn_id)).fetchall())
        if not rows:
            raise UnknownTurnError(turn_id)
        return tuple(_view(row) for row in rows)

    def find_chain(self, owner: str, chain: bytes, limit: int = 64) -> tuple[TurnView, ...]:
        """The turns of this chain, which differ in their replies, the one that was committed last first."""
        query = f"{_TURN} turns WHERE owner = ? AND chain = ? ORDER BY rowid DESC LIMIT ?"
        rows = self._run(lambda connection: connection.execute(query, (owner, chain, limit)).fetchall())
        return tuple(_view(row) for row in rows)

    def close(self) -> None:
        """Close the connections; a second call does nothing, any other raises HistoryError."""
        self.claims.close()
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _response(connection: Connection, owner: str, response_id: str) -> ResponseRecord:
    query = f"{responses_table.RECORD} WHERE responses.owner = ? AND responses.response_id = ?"
    row = connection.execute(query, (owner, response_id)).fetchone()
    if row is None:
        raise UnknownRecordError("response", response_id)
    return responses_table.unpack(row)


def _items(
    connection: Connection,
    owner: str,
    conversation_id: str,
    after: str | None,
    limit: int,
    order: Order,
) -> list[ItemRow]:
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order", order, '"asc" or "desc"')
    server_conversations.find(connection, owner, conversation_id)
    behind, values = "", [owner, conversation_id]
    if after is not None:
        last = server_conversations.find_item(connection, owner, conversation_id, after)
        behind = f"AND position {'>' if order == 'asc' else '<'} {last.position} "
    query = (
        f"{server_conversations.ITEM} WHERE owner = ? AND conversation_id = ? {behind}"
        f"ORDER BY position {order} LIMIT ?"
    )
    rows = connection.execute(query, (*values, limit))
    return [ItemRow(item_id=item_id, position=position, item=item) for item_id, position, item in rows]


def _view(row: Sequence[Any]) -> TurnView:
    return TurnView(
        turn_id=row[0],
        parent_id=row[1],
        turn_index=row[2],
        num_tokens=row[3],
        finish_reason=row[4],
        created_at_s=row[5],
        messages=codec.unpack_messages(row[6]),
        output_text=row[7],
        output_token_ids=tuple(codec.unpack_token_ids(row[8]).tolist()),
        usage=codec.unpack_usage(row[9]),
        chain=row[10] or b"",
    )
