"""Reads of a history by another process while the engine's process writes.

Owns: the look-ups. Each names the owner.
Does not know: how data is written (`table_store`), which database holds it (`opening`), or HTTP.

Each method sees one consistent state of the history with whole commits only, and waits neither for the writer
nor for other readers. Records that belong to an owner are looked up together with that owner. So another
owner's id gives the same message, after the same search, as an id that does not exist.
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
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.history import codec, opening, stored_amounts, turns_table
from pensieve_jax.history import trees as response_trees
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.postgres_location import is_postgres
from pensieve_jax.history.server_tables import idempotency_table, responses_table, server_conversations
from pensieve_jax.history.server_tables.changes import ConversationRow, Expire, ItemRow, ResponseRecord
from pensieve_jax.history.stored_amounts import StoredAmounts
from pensieve_jax.text.messages import Message

type Order = Literal["asc", "desc"]

_ALL: Final = 2**62  # rows

_TURN: Final = (
    "SELECT turns.turn_id, turns.parent_id, turns.turn_index, turns.num_tokens, finish_reason, created_at_s, "
    "messages, output_text, prompt_ids, output_ids, usage, chain FROM "
)


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn in its tree.

    Attributes:
      turn_id, parent_id, turn_index: its position in the tree.
      num_tokens: number of tokens of its path, up to its end.
      messages: its new chat messages; None for a turn that was sent as text or ids.
      template_input: what the prompt was rendered from beside them.
      output_text: None without a tokenizer.
      prompt_token_ids, output_token_ids: its own ids; as many of its parent's tokens stay before them as
        `num_tokens` has more.
      usage, chain: None and b"" if not stored.
    """

    turn_id: str
    parent_id: str | None
    turn_index: int
    num_tokens: int
    finish_reason: str
    created_at_s: float
    messages: tuple[Message, ...] | None
    output_text: str | None
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    usage: Usage | None
    chain: bytes
    template_input: TemplateInput = NO_INPUT


@dataclass(frozen=True, slots=True)
class Page[T]:
    """A part of a list, and whether more rows follow."""

    rows: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request that was sent with an idempotency key.

    Attributes:
      result_id: id of its response, or the name from which the ids of its appended items are derived.
    """

    body_sha256: str
    result_id: str
    expires_at_s: float


class HistoryReader:
    """Reader of a history in a file or in Postgres. Thread-safe.

    Attributes:
      is_remote: whether reads wait for a database server, which may be unavailable.
      claims: the jobs that this server does and no other server of the same history.
    """

    def __init__(self, history: str | os.PathLike[str], *, fingerprint: str) -> None:
        """Open a history that a writer has created, at a path or a URL.

        Raises HistoryError if it cannot be opened, and HistoryMismatchError if it is not a history of this
        release and this model.
        """
        self._connections = opening.open_for_reading(history, fingerprint)
        self.is_remote = is_postgres(history)
        self.claims = opening.claims_of(history)
        self._run = self._connections.run

    @property
    def is_damaged(self) -> bool:
        """Whether a read has found the history itself damaged."""
        return self._connections.is_damaged

    # Responses

    def response(self, owner: str, response_id: str) -> ResponseRecord:
        """Return a response in any state; raise UnknownRecordError."""
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
        """Return the items of a response's own request; raise UnknownRecordError, for `after` as well."""
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
        """Return the request that was sent with an unexpired key.

        With `conversation_id`, a request that appended items to that conversation, or with `NEW_CONVERSATION`
        one that created a conversation; otherwise a request for a response.
        """
        row = self._run(
            lambda connection: idempotency_table.find(connection, owner, key, now_s, conversation_id)
        )
        return None if row is None else KnownRequest(*row)

    def by_body(self, owner: str, body_sha256: str, since_s: float) -> ResponseRecord | None:
        """Return the last response to a request with this digest since a time; None for an empty digest."""
        query = (
            f"{responses_table.RECORD} WHERE responses.owner = ? AND responses.body_sha256 = ? "
            "AND responses.body_sha256 <> '' AND responses.created_at_s >= ? "
            "ORDER BY responses.created_at_s DESC LIMIT 1"
        )
        values = (owner, body_sha256, since_s)
        row = self._run(lambda connection: connection.execute(query, values).fetchone())
        return None if row is None else responses_table.unpack(row)

    def has_expired(self, change: Expire) -> bool:
        """Return whether the change would delete something."""

        def work(connection: Connection) -> bool:
            idle = server_conversations.first_idle(connection, change.now_s, change.idle_s, change.busy)
            return idle is not None or responses_table.has_expired(connection, change.now_s)

        return self._run(work)

    def unfinished_background(self) -> list[ResponseRecord]:
        """Return every owner's queued responses with their jobs, in order of arrival."""
        query = (
            f"{responses_table.RECORD} WHERE responses.status = 'queued' "
            "ORDER BY responses.created_at_s, responses.rowid"
        )
        rows = self._run(lambda connection: connection.execute(query).fetchall())
        return [responses_table.unpack(row) for row in rows]

    # Conversations of a server

    def conversation(self, owner: str, conversation_id: str) -> ConversationRow:
        """Return a conversation; raise UnknownRecordError."""
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
        """Return a conversation's items; raise UnknownRecordError, for `after` as well."""
        rows = self._run(
            lambda connection: _items(connection, owner, conversation_id, after, limit + 1, order)
        )
        return Page(tuple(rows[:limit]), len(rows) > limit)

    def size_of_items(self, owner: str, conversation_id: str) -> tuple[int, int]:
        """Return a conversation's numbers of items and of characters; raise UnknownRecordError."""

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
        """Return a conversation and its items in order, as of one moment: the input of a turn."""

        def work(connection: Connection) -> tuple[ConversationRow, tuple[ItemRow, ...]]:
            found = server_conversations.find(connection, owner, conversation_id)
            return found, tuple(_items(connection, owner, conversation_id, None, _ALL, "asc"))

        return self._run(work)

    def item(self, owner: str, conversation_id: str, item_id: str) -> ItemRow:
        """Return an item of a conversation; raise UnknownRecordError for either."""
        return self._run(
            lambda connection: server_conversations.find_item(connection, owner, conversation_id, item_id)
        )

    # What owners store

    def stored_by(self, owner: str) -> StoredAmounts:
        """Return what an owner stores."""
        return self._run(lambda connection: stored_amounts.find(connection, owner))

    def stored_by_all(self) -> StoredAmounts:
        """Return what all owners store together."""
        return self._run(stored_amounts.total)

    def oldest_conversations(self, owner: str, limit: int) -> list[tuple[str, float, float]]:
        """Return id, time of creation and time of last activity of conversations, the longest idle first."""
        query = (
            "SELECT conversation_id, created_at_s, last_active_s FROM conversations "
            "WHERE owner = ? AND metadata IS NOT NULL ORDER BY last_active_s, conversation_id LIMIT ?"
        )
        return self._run(lambda connection: connection.execute(query, (owner, limit)).fetchall())

    def oldest_responses(self, owner: str, limit: int) -> list[tuple[str, float, str]]:
        """Return id, time of creation and status of responses, the oldest first."""
        query = (
            "SELECT response_id, created_at_s, status FROM responses WHERE owner = ? "
            "ORDER BY created_at_s, response_id LIMIT ?"
        )
        return self._run(lambda connection: connection.execute(query, (owner, limit)).fetchall())

    # Trees of responses

    def trees(self, owner: str, limit: int = 100) -> list[response_trees.TreeSummary]:
        """Return an owner's trees of responses, the most recently active first."""
        return self._run(lambda connection: response_trees.trees(connection, owner, limit))

    def tree(self, owner: str, root: str, limit: int = 1000) -> list[response_trees.TreeTurn]:
        """Return the last responses of a tree in order of creation; [] for an unknown tree.

        Long texts reduce their number; see `trees.MAX_TREE_CHARACTERS`.
        """
        return self._run(lambda connection: response_trees.tree(connection, owner, root, limit))

    # Turns

    def turn(self, owner: str, turn_id: str) -> TurnView:
        """Return a turn; raise UnknownTurnError."""
        query = f"{_TURN} turns WHERE owner = ? AND turn_id = ?"
        row = self._run(lambda connection: connection.execute(query, (owner, turn_id)).fetchone())
        if row is None:
            raise UnknownTurnError(turn_id)
        return _view(row)

    def has_turn(self, owner: str, turn_id: str) -> bool:
        """Return whether the turn exists."""
        return self._run(lambda connection: turns_table.exists(connection, owner, turn_id))

    def turn_path(self, owner: str, turn_id: str) -> tuple[TurnView, ...]:
        """Return the turns from the first of a tree to this one; raise UnknownTurnError."""
        query = f"{turns_table.PATH}{_TURN} path JOIN turns USING (owner, turn_id) ORDER BY turns.turn_index"
        rows = self._run(lambda connection: connection.execute(query, (owner, turn_id)).fetchall())
        if not rows:
            raise UnknownTurnError(turn_id)
        return tuple(_view(row) for row in rows)

    def find_chain(self, owner: str, chain: bytes, limit: int = 64) -> tuple[tuple[str, str | None], ...]:
        """Return ids and replies of the turns of this chain, the last committed one first."""
        query = (
            "SELECT turn_id, output_text FROM turns WHERE owner = ? AND chain = ? ORDER BY rowid DESC LIMIT ?"
        )
        rows = self._run(lambda connection: connection.execute(query, (owner, chain, limit)).fetchall())
        return tuple((turn_id, text) for turn_id, text in rows)

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
    messages, template_input = codec.unpack_messages(row[6])
    return TurnView(
        turn_id=row[0],
        parent_id=row[1],
        turn_index=row[2],
        num_tokens=row[3],
        finish_reason=row[4],
        created_at_s=row[5],
        messages=messages,
        output_text=row[7],
        prompt_token_ids=tuple(codec.unpack_token_ids(row[8]).tolist()),
        output_token_ids=tuple(codec.unpack_token_ids(row[9]).tolist()),
        usage=codec.unpack_usage(row[10]),
        chain=row[11] or b"",
        template_input=template_input,
    )
