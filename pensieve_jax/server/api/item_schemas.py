"""Items: what clients send as input and conversations hold, and the messages they amount to.

Owns: which items and parts of content there are, their form when they are kept, and how their ids are made.
Does not know: where items are kept, turns, or responses.

An item is kept as a JSON object that satisfies OpenAI's schema for output: parts in a list, an id, a status.
The ids say where an item can be found again, which is what makes `item_reference` cheap: `msg_` and the id of
a turn is that turn's reply, with `_` and a number behind it one of its request's items.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from pensieve_jax.server.http.bodies import MAX_IGNORED, Body, check_num_items, convert
from pensieve_jax.server.http.errors import ApiError, invalid_value, unsupported
from pensieve_jax.text.messages import Message

type Item = dict[str, Any]

MAX_ITEMS_OF_A_POST: Final = 20
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_PARTS_WITHOUT_TEXT: Final = ("input_image", "input_file", "input_audio", "computer_screenshot")
_REPLY_ID: Final = re.compile(r"msg_([0-9a-f]{32})\Z")
_INPUT_ID: Final = re.compile(r"msg_([0-9a-f]{32})_(\d{1,6})\Z")


class Part(Body, kw_only=True):
    """A part of a message's content."""

    UNSUPPORTED = {"prompt_cache_breakpoint": ()}  # noqa: RUF012 - a ClassVar of the base class
    IGNORED = frozenset({"annotations", "logprobs"})

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(Body, kw_only=True):
    """A message, with a text or with parts."""

    IGNORED = frozenset({"id", "status", "phase", "object", "created_at", "name"})

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"


class ItemReference(Body, kw_only=True):
    """An item that the server has."""

    id: str
    type: Literal["item_reference"] | None = None


type NewItem = MessageItem | ItemReference


def parse_input(value: str | Sequence[Any], at: str) -> tuple[list[Item | ItemReference], tuple[str, ...]]:
    """The items of an input, messages in their kept form but without ids; and the fields that are unknown.

    Raises ApiError 400 with the path of what is wrong.
    """
    if isinstance(value, str):
        return [_kept("user", [value])], ()
    check_num_items(value, at)
    items: list[Item | ItemReference] = []
    ignored: dict[str, None] = {}
    for index, one in enumerate(value):
        item, unknown = _parse_item(one, f"{at}[{index}]")
        items.append(item)
        if len(ignored) < MAX_IGNORED:
            ignored |= dict.fromkeys(unknown)
    return items, tuple(ignored)


def _parse_item(value: Any, at: str) -> tuple[Item | ItemReference, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise invalid_value(at, f"{at} must be an object such as a message.")
    if is_reference(value):
        return convert(value, ItemReference, at)
    kind = value.get("type")
    if kind not in (None, "message"):
        raise unsupported(
            f"{at}.type", f"of items this server knows message and item_reference, not {kind!r}"
        )
    message, ignored = convert(dict(value), MessageItem, at)
    if isinstance(message.content, str):
        return _kept(message.role, [message.content]), ignored
    check_num_items(message.content, f"{at}.content")
    texts, more = [], list(ignored)
    for index, raw in enumerate(message.content):
        part, unknown = convert(raw, Part, f"{at}.content[{index}]")
        texts.append(_text_of(part, f"{at}.content[{index}]"))
        more += unknown
    return _kept(message.role, texts), tuple(more)


def is_reference(value: Any) -> bool:
    """Whether a part of an input names an item of before."""
    if not isinstance(value, Mapping):
        return False
    kind = value.get("type")
    return kind == "item_reference" or (kind is None and "id" in value and "role" not in value)


def _text_of(part: Part, at: str) -> str:
    if part.type in _PARTS_WITHOUT_TEXT:
        raise unsupported(f"{at}.type", f"the model reads text, not {part.type}")
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXT_PARTS:
        raise invalid_value(
            f"{at}.type", f"{at}.type is {part.type!r}, but must be input_text or output_text."
        )
    if part.text is None:
        raise ApiError(400, "missing_required_parameter", f"{at}.text is missing.", param=f"{at}.text")
    return part.text


def _kept(role: str, texts: Sequence[str]) -> Item:
    if role == "assistant":
        parts = [output_part(text) for text in texts]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "status": "completed", "role": role, "content": parts}


def item_of(message: Mapping[str, Any]) -> Item:
    """A message of text as an item that is kept, without an id."""
    return _kept(message["role"], [message["content"]])


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
