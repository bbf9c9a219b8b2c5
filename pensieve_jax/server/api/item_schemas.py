"""Items as clients send them.

Owns: which items and parts of content a request may have, and the way to their kept form.
Does not know: where items are kept, how their ids are made, turns, or responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pensieve_jax.server.http.bodies import MAX_IGNORED, Body, check_num_items, convert
from pensieve_jax.server.http.errors import ApiError, invalid_value, unsupported
from pensieve_jax.server.turns.items import Item, kept_item

MAX_ITEMS_OF_A_POST: Final = 20
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_PARTS_WITHOUT_TEXT: Final = ("input_image", "input_file", "input_audio", "computer_screenshot")


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
        return [kept_item("user", [value])], ()
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
        return kept_item(message.role, [message.content]), ignored
    check_num_items(message.content, f"{at}.content")
    texts, more = [], list(ignored)
    for index, raw in enumerate(message.content):
        part, unknown = convert(raw, Part, f"{at}.content[{index}]")
        texts.append(_text_of(part, f"{at}.content[{index}]"))
        more += unknown
    return kept_item(message.role, texts), tuple(more)


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
