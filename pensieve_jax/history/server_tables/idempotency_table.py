"""The requests that must not run twice.

Owns: the statements on `idempotency`, and the scope of a key.
Does not know: transactions (the caller holds one), or what a request asked for.

The key of a request for a response is stored as given and is valid for its owner. The key of a request that
appends items is valid for one conversation: it is stored after the conversation's id and a line break, which
no HTTP header contains. The key of a request for a new conversation is stored after `NEW_CONVERSATION`.
"""

from __future__ import annotations

from typing import Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.history import codec
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.server_tables.changes import Idempotency

NEW_CONVERSATION: Final = "conversations"
"""Scope of the keys of requests for new conversations; no conversation has this id."""
type KnownRow = tuple[str, str, float]  # digest of the body, result id, time of expiry


def keep(
    connection: Connection,
    owner: str,
    request: Idempotency,
    result_id: str,
    now_s: float,
    conversation_id: str | None = None,
) -> None:
    """Store a key with the result of its request; an expired key is free again.

    Raises InvalidRequestError for a key that is taken.
    """
    key = _key(request.key, conversation_id)
    connection.execute(
        "DELETE FROM idempotency WHERE owner = ? AND key = ? AND expires_at_s <= ?", (owner, key, now_s)
    )
    values = (owner, key, request.body_sha256, result_id, request.expires_at_s)
    connection.execute_changing(
        "INSERT INTO idempotency VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        values,
        lambda: InvalidRequestError("idempotency.key", request.key, "a key that no other request has"),
    )


def check(request: object, field: str) -> None:
    """Raise InvalidRequestError unless `request` is an Idempotency whose texts can be stored."""
    if not isinstance(request, Idempotency):
        raise InvalidRequestError(field, request, "an Idempotency or None")
    codec.check_text(request.key, f"{field}.key")
    codec.check_text(request.body_sha256, f"{field}.body_sha256")


def find(
    connection: Connection, owner: str, key: str, now_s: float, conversation_id: str | None
) -> KnownRow | None:
    """Return the request that was sent with an unexpired key."""
    query = (
        "SELECT body_sha256, response_id, expires_at_s FROM idempotency "
        "WHERE owner = ? AND key = ? AND expires_at_s > ?"
    )
    row: KnownRow | None = connection.execute(query, (owner, _key(key, conversation_id), now_s)).fetchone()
    return row


def forget(connection: Connection, owner: str, result_id: str) -> None:
    """Free the key of a response, or of a request for a new conversation."""
    connection.execute("DELETE FROM idempotency WHERE owner = ? AND response_id = ?", (owner, result_id))


def forget_conversation(connection: Connection, owner: str, conversation_id: str) -> None:
    """Free the keys that are valid in a conversation."""
    bounds = (_key("", conversation_id), f"{conversation_id}\v")  # the character after a line break
    connection.execute("DELETE FROM idempotency WHERE owner = ? AND key >= ? AND key < ?", (owner, *bounds))


def expire(connection: Connection, now_s: float, max_num: int) -> None:
    """Free up to `max_num` expired keys, the oldest first."""
    connection.execute(
        "DELETE FROM idempotency WHERE rowid IN (SELECT rowid FROM idempotency WHERE expires_at_s <= ? "
        "ORDER BY expires_at_s LIMIT ?)",
        (now_s, max_num),
    )


def _key(key: str, conversation_id: str | None) -> str:
    return key if conversation_id is None else f"{conversation_id}\n{key}"
