"""The responses of a server.

Owns: the statements on `responses`, and which status follows from the end of a turn.
Does not know: transactions (the caller holds one), or what a response's fields mean to a client.

The text of a reply is stored once, in its turn; a response refers to the turn. A queued response has no turn
yet: it refers to the turn that it continues, which therefore stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError, UnknownRecordError, UnknownTurnError
from pensieve_jax.history import codec, turns_table
from pensieve_jax.history.codec import TurnRow
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.server_tables import idempotency_table, server_conversations
from pensieve_jax.history.server_tables.changes import (
    ConversationAppend,
    DeleteResponse,
    EndResponse,
    Expire,
    QueueResponse,
    ResponseDraft,
    ResponseRecord,
    StartResponse,
    TakeBackStart,
)
from pensieve_jax.history.server_tables.server_conversations import Item
from pensieve_jax.history.store import TurnKey

MAX_EXPIRED: Final = 50  # per change, so that the engine's thread is not blocked for long
_OWN_FIELDS: Final = (
    *("response_id", "owner", "request", "input_items", "output_item_id", "created_at_s", "expires_at_s"),
    *("background", "status", "turn_id", "completed_at_s", "error", "job", "starts"),
)
_TURN_FIELDS: Final = ("output_text", "finish_reason", "usage", "messages")
RECORD: Final = (
    f"SELECT {', '.join(f'responses.{name}' for name in _OWN_FIELDS)}, "
    f"{', '.join(f'turns.{name}' for name in _TURN_FIELDS)} FROM responses "
    "LEFT JOIN turns ON turns.owner = responses.owner AND turns.turn_id = responses.turn_id"
)
_INSERT: Final = (
    "INSERT INTO responses(owner, response_id, status, turn_id, request, input_items, output_item_id, "
    "created_at_s, expires_at_s, completed_at_s, background, body_sha256, job) "
    f"VALUES ({', '.join('?' * 13)}) ON CONFLICT DO NOTHING"
)
_THIS: Final = "owner = ? AND response_id = ?"


def unpack(row: Sequence[Any]) -> ResponseRecord:
    """Return the response of a row of `RECORD`."""
    fields = dict(zip(_OWN_FIELDS + _TURN_FIELDS, row, strict=True))
    if fields["status"] == "queued":
        fields |= dict.fromkeys(("turn_id", *_TURN_FIELDS))  # those of the turn that it continues
    elif fields["job"] is not None:
        fields |= {"job": None, "logprobs": fields["job"]}
    _, template_input = codec.unpack_messages(fields.pop("messages"))
    return ResponseRecord(
        **{**fields, "background": bool(fields["background"]), "template_input": template_input}
    )


def check_draft(draft: object, owner: str | None, field: str) -> tuple[ResponseDraft, list[Item]]:
    """Return a valid draft and its conversation's new items; raise InvalidRequestError.

    `owner` is the owner of its turn; None before there is a turn.
    """
    if not isinstance(draft, ResponseDraft):
        raise InvalidRequestError(field, draft, "a ResponseDraft or None")
    if owner is not None and draft.owner != owner:
        raise InvalidRequestError(f"{field}.owner", draft.owner, "the turn's owner")
    for name in ("response_id", "owner", "request", "input_items", "output_item_id", "body_sha256"):
        codec.check_text(getattr(draft, name), f"{field}.{name}")
    if draft.idempotency is not None:
        idempotency_table.check(draft.idempotency, f"{field}.idempotency")
    if draft.conversation is None:
        return draft, []
    return draft, _items_of(draft.conversation, f"{field}.conversation")


def _items_of(append: object, field: str) -> list[Item]:
    if not isinstance(append, ConversationAppend):
        raise InvalidRequestError(field, append, "a ConversationAppend or None")
    return server_conversations.parse_items(append.items, f"{field}.items")


def complete(
    connection: Connection,
    draft: ResponseDraft,
    items: Sequence[Item],
    row: TurnRow,
    logprobs: bytes | None = None,
) -> None:
    """After a turn was added, store its response, its request's key, and its items in a conversation.

    `items` are those of the request and of its reply. `logprobs` are the packed log-probabilities of its
    reply, if they were requested.

    Raises UnknownRecordError for a background response that is not queued any more, ConversationChangedError,
    or InvalidRequestError for an id or a key that is taken.
    """
    status = "completed" if row.finish_reason == "stop" else "incomplete"
    if draft.background:
        connection.execute_changing(
            "UPDATE responses SET status = ?, turn_id = ?, completed_at_s = ?, job = ? "
            f"WHERE {_THIS} AND status = 'queued'",
            (status, row.turn_id, row.created_at_s, logprobs, draft.owner, draft.response_id),
            lambda: UnknownRecordError("response", draft.response_id),
        )
    else:
        _insert(
            connection,
            draft,
            status,
            turn_id=row.turn_id,
            completed_at_s=row.created_at_s,
            job=logprobs,
        )
    if draft.conversation is not None:
        server_conversations.append_turn(connection, draft.conversation, items, row)


def queue(connection: Connection, change: QueueResponse) -> None:
    """Store a background response that has not run.

    Raises InvalidRequestError for an id or a key that is taken, UnknownTurnError for a missing parent, and
    ConversationChangedError if its conversation has changed since the request read it: the turn could only
    fail later.
    """
    draft, _ = check_draft(change.draft, None, "draft")
    if draft.conversation is not None:
        server_conversations.check_version(connection, draft.owner, draft.conversation)
    if change.parent_id is not None and not turns_table.exists(connection, draft.owner, change.parent_id):
        raise UnknownTurnError(change.parent_id)
    _insert(connection, draft, "queued", turn_id=change.parent_id, job=change.job)
    if draft.conversation is not None:  # it must not become idle while the response waits
        key = draft.owner, draft.conversation.conversation_id
        server_conversations.touch(connection, key, draft.created_at_s)


def start(connection: Connection, change: StartResponse) -> None:
    """Store the count of a queued response's runs; raise UnknownRecordError if it is not queued."""
    starts = change.starts
    if isinstance(starts, bool) or not isinstance(starts, int) or starts < 0:
        raise InvalidRequestError("starts", starts, "an int of at least 0")
    connection.execute_changing(
        f"UPDATE responses SET starts = ? WHERE {_THIS} AND status = 'queued'",
        (starts, change.owner, change.response_id),
        lambda: UnknownRecordError("response", change.response_id),
    )


def take_back_start(connection: Connection, change: TakeBackStart) -> None:
    """Count one run less of a queued response."""
    connection.execute(
        f"UPDATE responses SET starts = starts - 1 WHERE {_THIS} AND status = 'queued' AND starts > 0",
        (change.owner, change.response_id),
    )


def end(connection: Connection, change: EndResponse, in_use: Collection[str]) -> list[TurnKey]:
    """End a queued response without a turn, and return removed turns; one that has ended is not changed."""
    if change.status not in ("cancelled", "failed"):
        raise InvalidRequestError("status", change.status, '"cancelled" or "failed"')
    parent_id = _turn_of(connection, change.owner, change.response_id)
    ended = connection.execute(
        "UPDATE responses SET status = ?, turn_id = NULL, completed_at_s = ?, error = ?, job = NULL "
        f"WHERE {_THIS} AND status = 'queued'",
        (change.status, change.completed_at_s, change.error, change.owner, change.response_id),
    )
    return turns_table.collect(connection, change.owner, parent_id, in_use) if ended.rowcount else []


def delete(connection: Connection, change: DeleteResponse, in_use: Collection[str]) -> list[TurnKey]:
    """Forget a response, its request's key, and its turn unless that is needed; return removed turns."""
    return _forget(connection, change.owner, change.response_id, in_use)


def expire(connection: Connection, change: Expire, in_use: Collection[str]) -> list[TurnKey]:
    """Forget ended responses and keys that have expired, and return removed turns.

    The oldest go first, at most `MAX_EXPIRED` of each.
    """
    query = (
        "SELECT owner, response_id FROM responses WHERE expires_at_s <= ? AND status <> 'queued' "
        "ORDER BY expires_at_s LIMIT ?"
    )
    expired = connection.execute(query, (change.now_s, MAX_EXPIRED)).fetchall()
    removed = [
        key for owner, response_id in expired for key in _forget(connection, owner, response_id, in_use)
    ]
    idempotency_table.expire(connection, change.now_s, MAX_EXPIRED)
    return removed


def has_expired(connection: Connection, now_s: float) -> bool:
    """Return whether `expire` would find an expired response or key."""
    query = (
        "SELECT EXISTS (SELECT 1 FROM responses WHERE expires_at_s <= ? AND status <> 'queued') "
        "OR EXISTS (SELECT 1 FROM idempotency WHERE expires_at_s <= ?)"
    )
    return bool(connection.execute(query, (now_s, now_s)).fetchone()[0])


def _insert(
    connection: Connection,
    draft: ResponseDraft,
    status: str,
    *,
    turn_id: str | None = None,
    completed_at_s: float | None = None,
    job: bytes | None = None,
) -> None:
    values = (
        *(draft.owner, draft.response_id, status, turn_id, draft.request, draft.input_items),
        *(draft.output_item_id, draft.created_at_s, draft.expires_at_s, completed_at_s),
        *(int(draft.background), draft.body_sha256, job),
    )
    limit = "an id that no response has, with every field given"
    connection.execute_changing(
        _INSERT, values, lambda: InvalidRequestError("response_id", draft.response_id, limit)
    )
    if draft.idempotency is not None:
        idempotency_table.keep(
            connection, draft.owner, draft.idempotency, draft.response_id, draft.created_at_s
        )


def _turn_of(connection: Connection, owner: str, response_id: str) -> str | None:
    row = connection.execute(f"SELECT turn_id FROM responses WHERE {_THIS}", (owner, response_id)).fetchone()
    if row is None:
        raise UnknownRecordError("response", response_id)
    turn_id: str | None = row[0]
    return turn_id


def _forget(connection: Connection, owner: str, response_id: str, in_use: Collection[str]) -> list[TurnKey]:
    turn_id = _turn_of(connection, owner, response_id)
    connection.execute(f"DELETE FROM responses WHERE {_THIS}", (owner, response_id))
    idempotency_table.forget(connection, owner, response_id)
    return turns_table.collect(connection, owner, turn_id, in_use)
