"""Stored items of conversations and responses, and their conversion to messages.

Owns: the stored form of an item, and how item ids are made.
Does not know: which items clients may send, where items are stored, turns, or responses.
Called by `server.openai` and `turns.stored`.

An item is stored as a JSON object that satisfies OpenAI's output schema: a list of parts, an id, a status.
The id tells where the item is, so resolving an `item_reference` needs no search: `msg_<turn id>` is the reply
of that turn, and `msg_<turn id>_<n>` is item n of its request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.text.messages import Message

type Item = dict[str, Any]
_REPLY_ID: Final = re.compile(r"msg_([0-9a-f]{32})\Z")
_INPUT_ID: Final = re.compile(r"msg_([0-9a-f]{32})_(\d{1,6})\Z")


def item_of(message: Mapping[str, Any]) -> Item:
    """Convert a text message to a stored item without an id."""
    return stored_item(message["role"], [message["content"]])


def stored_item(role: str, texts: Sequence[str]) -> Item:
    """Return a stored item without an id: a message whose parts have these texts."""
    if role == "assistant":
        parts = [output_part(text) for text in texts]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "status": "completed", "role": role, "content": parts}


def output_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the `output_text` part of a reply."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_of(item: Mapping[str, Any]) -> Message:
    """Convert a stored item to a message for the model, with the texts of its parts joined."""
    text = "".join(part.get("text") or part.get("refusal") or "" for part in item["content"])
    return {"role": item["role"], "content": text}


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Convert stored items to messages."""
    return [message_of(item) for item in items]


def reply_id(turn_id: str) -> str:
    """Return the item id of the reply of a turn."""
    return f"msg_{turn_id}"


def with_input_ids(items: Iterable[Item], turn_id: str) -> list[Item]:
    """Return the items of a turn's request with ids made of the turn id and their position."""
    return [{**item, "id": f"msg_{turn_id}_{index}"} for index, item in enumerate(items)]


def with_new_ids(items: Iterable[Item]) -> list[Item]:
    """Return items that belong to no turn with new random ids."""
    return [{**item, "id": f"msg_{secrets.token_hex(24)}"} for item in items]


def with_named_ids(items: Iterable[Item], name: str) -> list[Item]:
    """Return items that belong to no turn with ids derived from `name` and their positions."""
    return [{**item, "id": named_id(name, index)} for index, item in enumerate(items)]


def named_id(name: str, index: int) -> str:
    """Return the id that `with_named_ids` gives the item at position `index`."""
    return f"msg_{hashlib.sha256(f'{name}/{index}'.encode()).hexdigest()[:48]}"


def position_of(item_id: str) -> tuple[str, int | None] | None:
    """Return the turn id and the position in its request that an item id encodes.

    The reply of a turn has the position None. Return None for an id that encodes no turn.
    """
    match = _REPLY_ID.match(item_id)
    if match:
        return match[1], None
    match = _INPUT_ID.match(item_id)
    return (match[1], int(match[2])) if match else None
