"""Items that conversations and responses hold, and the messages they amount to.

Owns: the form of an item that is kept, and how ids are made.
Does not know: what clients send as items, where items are kept, turns, or responses.

An item is kept as a JSON object that satisfies OpenAI's schema for output: parts in a list, an id, a status.
The ids say where an item can be found again, which is what makes `item_reference` cheap: `msg_` and the id of
a turn is that turn's reply, with `_` and a number behind it one of its request's items.
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
    """A message of text as an item that is kept, without an id."""
    return kept_item(message["role"], [message["content"]])


def kept_item(role: str, texts: Sequence[str]) -> Item:
    """A message with these parts as an item that is kept, without an id."""
    if role == "assistant":
        parts = [output_part(text) for text in texts]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "status": "completed", "role": role, "content": parts}


def output_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The content of a reply."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_of(item: Mapping[str, Any]) -> Message:
    """The message that a kept item is, for a model: its parts are one text."""
    text = "".join(part.get("text") or part.get("refusal") or "" for part in item["content"])
    return {"role": item["role"], "content": text}


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """The messages of kept items."""
    return [message_of(item) for item in items]


def reply_id(turn_id: str) -> str:
    """The id of a turn's reply."""
    return f"msg_{turn_id}"


def with_input_ids(items: Iterable[Item], turn_id: str) -> list[Item]:
    """The items of the request of a turn, with ids."""
    return [{**item, "id": f"msg_{turn_id}_{index}"} for index, item in enumerate(items)]


def with_new_ids(items: Iterable[Item]) -> list[Item]:
    """Items that come with no turn, with ids that nobody has."""
    return [{**item, "id": f"msg_{secrets.token_hex(24)}"} for item in items]


def with_named_ids(items: Iterable[Item], name: str) -> list[Item]:
    """Items that come with no turn, with ids that follow from a name and their places."""
    return [{**item, "id": named_id(name, index)} for index, item in enumerate(items)]


def named_id(name: str, index: int) -> str:
    """The id of the item at a place."""
    return f"msg_{hashlib.sha256(f'{name}/{index}'.encode()).hexdigest()[:48]}"


def place_of(item_id: str) -> tuple[str, int | None] | None:
    """The turn that an item came with, and its place among the request's; None for the reply's place.

    None for an id that says nothing of the kind.
    """
    match = _REPLY_ID.match(item_id)
    if match:
        return match[1], None
    match = _INPUT_ID.match(item_id)
    return (match[1], int(match[2])) if match else None
