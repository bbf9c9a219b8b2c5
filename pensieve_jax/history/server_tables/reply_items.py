"""The items of a reply, as conversations store them and responses show them.

Owns: the form of each item, its id, and the order of a reply's items.
Does not know: tables, streams, or requests.

The items are a function of the turn's id, its text and how its reply is read. So a conversation, a stored
response and a stream of it have the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.text.replies import call_id, has_parts, new_parser
from pensieve_jax.text.reply_events import (
    ArgumentText,
    CallBegun,
    CallEnded,
    ContentText,
    ReasoningText,
    ReplyEvent,
)

type Item = dict[str, Any]


class ReplyItems:
    """The items of one reply from the events of its parser.

    Attributes:
      items: the items so far. The last one may be open, with the status "in_progress".
    """

    def __init__(self, turn_id: str, template: TemplateInput) -> None:
        """Start without items; `template` says how the reply is read."""
        self.items: list[Item] = []
        self._turn_id, self._reply = turn_id, template.reply
        self._numbers = {"msg": 0, "rs": 0, "fc": 0}

    def opens(self, event: ReplyEvent) -> bool:
        """Return whether an event begins a new item."""
        if isinstance(event, ReasoningText | ContentText):
            kind = "reasoning" if isinstance(event, ReasoningText) else "message"
            return not (self._is_open and self.items[-1]["type"] == kind)
        return isinstance(event, CallBegun)

    @property
    def _is_open(self) -> bool:
        return bool(self.items) and self.items[-1]["status"] == "in_progress"

    def open(self, event: ReplyEvent) -> Item:
        """Add the item that an event begins, without text."""
        if isinstance(event, CallBegun):
            found = call_id(self._turn_id, event.call, row=self._reply.calls, header=event.header)
            item = opened(self._id("fc"), call_item(found, event.name, ""))
        elif isinstance(event, ReasoningText):
            item = opened(self._id("rs"), reasoning_item(""))
        else:
            item = opened(self._id("msg"), assistant_item([""]))
        self.items.append(item)
        return item

    def add(self, event: ReplyEvent) -> None:
        """Add the text of an event to the last item."""
        if isinstance(event, ArgumentText):
            self.items[-1]["arguments"] += event.text
        elif isinstance(event, ReasoningText | ContentText):
            self.items[-1]["content"][0]["text"] += event.text

    def close(self, status: str = "completed") -> Item | None:
        """End the last item, and return it; None if no item is open."""
        if not self._is_open:
            return None
        self.items[-1]["status"] = status
        return self.items[-1]

    def _id(self, prefix: str) -> str:
        number = self._numbers[prefix]
        self._numbers[prefix] += 1
        return f"{prefix}_{self._turn_id}" + (f"r{number}" if number else "")


def reply_items(turn_id: str, text: str, template: TemplateInput, status: str) -> list[Item]:
    """Return the items of a finished reply; the last one has the reply's status."""
    found = ReplyItems(turn_id, template)
    if has_parts(template):
        parser = new_parser(template)
        add_events(found, (*parser.feed(text), *parser.end()))
    elif text:
        add_events(found, [ContentText(text)])
    if not found.items:
        found.open(ContentText(""))
    found.close()
    found.items[-1]["status"] = status
    return found.items


def add_events(items: ReplyItems, events: Iterable[ReplyEvent]) -> None:
    """Add the events of a parser to the items of its reply."""
    for event in events:
        if items.opens(event):
            items.close()
            items.open(event)
        items.add(event)
        if isinstance(event, CallEnded):
            items.close()


def opened(item_id: str, item: Item) -> Item:
    """Return an item with its id, to which text may still be added."""
    return {"id": item_id, **item, "status": "in_progress"}


def assistant_item(texts: Iterable[str]) -> Item:
    """Return a complete item without an id: a message of the assistant whose parts have these texts."""
    parts = [output_part(text) for text in texts]
    return {"type": "message", "status": "completed", "role": "assistant", "content": parts}


def reasoning_item(text: str) -> Item:
    """Return a complete item without an id: the reasoning before a reply. It has no summary."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "status": "completed", "summary": [], "content": content}


def call_item(call_id: str, name: str, arguments: str) -> Item:
    """Return a complete item without an id: a call of a function."""
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"type": "function_call", "status": "completed", **call}


def output_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the `output_text` part of a reply."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
