"""Stored items of conversations and responses, and their conversion to messages.

Owns: the stored form of an item, and how item ids are made.
Does not know: which items clients may send, where items are stored, turns, or responses.
Called by `server.openai` and `turns.stored`.

An item is stored as a JSON object that satisfies OpenAI's output schema: a list of parts, an id, a status.
The id tells where the item is, so resolving an `item_reference` needs no search: `msg_<turn id>`,
`rs_<turn id>` and `fc_<turn id>` are the first message, reasoning and call of the reply of that turn, and
`r<n>` at their end makes later ones; `msg_<turn id>_<n>` is item n of its request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.history.server_tables.reply_items import Item, assistant_item, call_item, reasoning_item
from pensieve_jax.text.messages import Message, message_call

_REPLY_ID: Final = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})(?:r[1-9]\d{0,5})?\Z")
_INPUT_ID: Final = re.compile(r"msg_([0-9a-f]{32})_(\d{1,6})\Z")


def items_of(messages: Iterable[Message]) -> list[Item]:
    """Convert messages to stored items without ids. One of the assistant may become several items."""
    items: list[Item] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(output_item(message["tool_call_id"], message["content"]))
            continue
        if message.get("reasoning"):
            items.append(reasoning_item(message["reasoning"]))
        if message["content"] is not None:
            items.append(stored_item(message["role"], [message["content"]]))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            items.append(call_item(call["id"], function["name"], function["arguments"]))
    return items


def output_item(call_id: str, output: str) -> Item:
    """Return a stored item without an id: the result of a call."""
    return {"type": "function_call_output", "status": "completed", "call_id": call_id, "output": output}


def stored_item(role: str, texts: Sequence[str]) -> Item:
    """Return a stored item without an id: a message whose parts have these texts."""
    if role == "assistant":
        return assistant_item(texts)
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "status": "completed", "role": role, "content": parts}


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Convert stored items to messages, with the texts of their parts joined.

    Items of one reply become one message: its reasoning, its text and its calls. A text after a call that has
    no result yet belongs to the same reply; a text after a text is another message.
    """
    messages: list[Message] = []
    reply: dict[str, Any] | None = None  # the last message, while further items may belong to it
    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and item["role"] == "assistant":
            if reply is None or (reply["content"] is not None and "tool_calls" not in reply):
                reply = _new_reply(messages)
            reply["content"] = (reply["content"] or "") + text_of(item)
        elif kind == "function_call":
            reply = reply or _new_reply(messages)
            call = message_call(item["call_id"], item["name"], item["arguments"])
            reply.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            if not text_of(item):
                continue  # only a summary, which models do not read
            if reply is None or reply["content"] is not None or "tool_calls" in reply:
                reply = _new_reply(messages)
            reply["reasoning"] = reply.get("reasoning", "") + text_of(item)
        else:
            reply = None
            messages.append(_other_message(item, kind))
    for index, message in enumerate(messages):
        if message["content"] is None and "tool_calls" not in message:
            messages[index] = {**message, "content": ""}  # of reasoning alone
    return messages


def _new_reply(messages: list[Message]) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": None}
    messages.append(reply)
    return reply


def _other_message(item: Mapping[str, Any], kind: str) -> Message:
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    return {"role": item["role"], "content": text_of(item)}


def text_of(item: Mapping[str, Any]) -> str:
    """Return the text that the model reads of a stored item."""
    kind = item.get("type", "message")
    if kind == "function_call":
        return f"{item['name']}{item['arguments']}"
    if kind == "function_call_output":
        return str(item["output"])
    return "".join(part.get("text") or part.get("refusal") or "" for part in item.get("content") or ())


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
