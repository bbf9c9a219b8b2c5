"""The idempotency key of a request, and the turn that an earlier request with it has stored.

Owns: reading the key, its record in the history, and the rules for a completion that is sent again.
Does not know: the fields of any request, or how an earlier reply is written.

A completion with a key runs once. While it runs, the same request waits for its end. Then it gets the stored
reply, or runs if nothing was stored. `openai.responses` has rules of its own, since a response continues when
its client leaves.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pensieve_jax.core.errors import UnknownRecordError, UnknownTurnError
from pensieve_jax.history.reader import HistoryReader, TurnView
from pensieve_jax.history.server_tables.changes import Idempotency, ResponseRecord
from pensieve_jax.server.http.errors import ApiError, invalid_value, unsupported
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.http.services import RunningKey

KEY_LIFETIME_S: Final = 24 * 3600.0
MAX_KEY_CHARACTERS: Final = 255
_NAME: Final = "Idempotency-Key"


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the idempotency key of a request; raise ApiError 400 for an empty or too long key."""
    key = headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        sentence = f"Idempotency-Key has {len(key)} characters, but must have 1 to {MAX_KEY_CHARACTERS}."
        raise ApiError(400, "invalid_value", sentence, param="Idempotency-Key")
    return key


def key_record(key: str | None, body_sha256: str, now_s: float) -> Idempotency | None:
    """Return the record of an idempotency key to commit, or None without a key."""
    if key is None:
        return None
    return Idempotency(key=key, body_sha256=body_sha256, expires_at_s=now_s + KEY_LIFETIME_S)


def check_same_body(body_sha256: str, earlier: str) -> None:
    """Raise ApiError 422 if the digest differs from that of the earlier request with this key."""
    if body_sha256 != earlier:
        sentence = (
            "This Idempotency-Key came with another body or route before; use a new key for a new request."
        )
        raise ApiError(422, "idempotency_key_reused", sentence, param="Idempotency-Key")


class StoredReply(NamedTuple):
    """The response record of an earlier request, and its turn."""

    record: ResponseRecord
    turn: TurnView


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request for a completion that has a key.

    Attributes:
      idempotency: what is committed with its turn.
      earlier: the reply to an earlier request with this key; None if this request is the first.
    """

    idempotency: Idempotency
    earlier: StoredReply | None


async def keyed_request(
    call: HttpRequest, *, stores: bool, num_replies: int = 1, has_scores: str | None = None
) -> KeyedRequest | None:
    """Register a request with a key until its answer was sent, and look for an earlier one.

    Args:
      call: the request.
      stores: whether its turn is stored.
      num_replies: number of its replies.
      has_scores: the field that asks for scores of the prompt, which are not stored.

    Returns None for a request without a key, and for one whose turn is not stored: its key is listed as
    ignored. Waits for a request with the same key that runs. Raises ApiError 400 if its answer could not be
    returned again, and 422 if the earlier request had another body or route.
    """
    key = idempotency_key(call.headers)
    if key is None:
        return None
    if not stores:
        call.notes.ignored_fields += (_NAME,)
        return None
    if num_replies > 1:
        sentence = f"{_NAME} came with a request for {num_replies} replies; it must be for one."
        raise invalid_value(_NAME, sentence)
    if has_scores is not None:
        raise unsupported(_NAME, f"{has_scores} asks for scores of the prompt, which are not stored")
    route = call.notes.route or ""
    body_sha256 = hashlib.sha256(route.encode() + b"\n" + call.body).hexdigest()
    running, name = call.services.running_keys, (call.owner, key)
    while (other := running.get(name)) is not None:
        check_same_body(body_sha256, other.body_sha256)
        await call.unless_gone(other.ended.wait())
    mine = running[name] = RunningKey(body_sha256, asyncio.Event())

    def end() -> None:
        if running.get(name) is mine:
            del running[name]
            mine.ended.set()

    call.ticket.on_close(end)
    now_s = call.services.now_s()
    earlier = await call.read(_stored_reply, call.services.history, call.owner, key, body_sha256, now_s)
    if earlier is not None:
        end()
    record = Idempotency(key=key, body_sha256=body_sha256, expires_at_s=now_s + KEY_LIFETIME_S)
    return KeyedRequest(record, earlier)


def _stored_reply(
    history: HistoryReader, owner: str, key: str, body_sha256: str, now_s: float
) -> StoredReply | None:
    known = history.idempotent(owner, key, now_s)
    if known is None:
        return None
    check_same_body(body_sha256, known.body_sha256)
    try:
        record = history.response(owner, known.result_id)
        assert record.turn_id is not None, "a completion is stored with its turn"
        return StoredReply(record, history.turn(owner, record.turn_id))
    except (UnknownRecordError, UnknownTurnError):  # it was deleted meanwhile, and its key with it
        return None
