"""The output items of a response as the pieces of its reply arrive, and the events for them.

Owns: when an item begins and ends, and which log-probabilities belong to its text.
Does not know: the numbers and the encoding of events, or where pieces come from.
Called by `events` and `response`.

A reply that is content only is one message, which begins before its first piece. Other replies are items of
reasoning, messages and calls in the order of the text, each from its first character on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.history.server_tables.reply_items import (
    Item,
    ReplyItems,
    assistant_item,
    opened,
    output_part,
    reply_items,
)
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.openai.responses.pieces import ReplyPieces, TextPiece
from pensieve_jax.server.turns.items import reply_id
from pensieve_jax.text.replies import has_parts, new_parser, shown_marks
from pensieve_jax.text.reply_events import (
    ArgumentText,
    CallBegun,
    CallEnded,
    ContentText,
    ReasoningText,
    ReplyEvent,
)
from pensieve_jax.text.token_texts import TokenTexts

type WireEvents = list[tuple[str, dict[str, Any]]]
"""Types of events with their fields, in order."""


class Output(Protocol):
    """The output items of one response."""

    def begin(self) -> WireEvents:
        """Return the events before the first piece."""
        ...

    def add(self, piece: TextPiece) -> WireEvents:
        """Return the events of the next piece."""
        ...

    def end(self, response: Mapping[str, Any]) -> WireEvents:
        """Return the events after the last piece, given the final response object."""
        ...

    def equals(self, response: Mapping[str, Any]) -> bool:
        """Return whether the pieces, up to the end, add up to the output of a response object."""
        ...


def new_output(turn_id: str, template: TemplateInput, texts: TokenTexts) -> Output:
    """Return the output of a turn before its first piece."""
    return _Parts(turn_id, template, texts) if has_parts(template) else _Message(turn_id, texts)


def output_items(
    turn_id: str,
    template: TemplateInput,
    text: str,
    status: str,
    logprobs: Sequence[TokenLogprob] | None,
    texts: TokenTexts,
) -> list[Item]:
    """Return the output of a finished reply with this text."""
    if not has_parts(template):
        item = {**assistant_item([text]), "id": reply_id(turn_id), "status": status}
        item["content"][0]["logprobs"] = logprob_objects(texts, logprobs or ())
        return [item]
    if not logprobs:
        return reply_items(turn_id, text, template, status)
    parts = _Parts(turn_id, template, texts)
    ids = tuple(one.token_id for one in logprobs)
    pieces = ReplyPieces(texts.tokenizer, shown_marks(template))
    for piece in pieces.split(AsyncDelta(text, ids, tuple(logprobs))):
        parts.add(piece)
    parts.end({"status": status})
    return parts.items


class _Message:
    """A reply that is one message."""

    def __init__(self, turn_id: str, texts: TokenTexts) -> None:
        self._item_id = reply_id(turn_id)
        self._texts = texts
        self._said: list[str] = []

    def begin(self) -> WireEvents:
        item = opened(self._item_id, assistant_item(()))
        return [
            ("response.output_item.added", {"output_index": 0, "item": item}),
            ("response.content_part.added", {**self._place(), "part": output_part("")}),
        ]

    def add(self, piece: TextPiece) -> WireEvents:
        self._said.append(piece.text)
        logprobs = logprob_objects(self._texts, piece.logprobs)
        fields = {**self._place(), "delta": piece.text, "logprobs": logprobs}
        return [("response.output_text.delta", fields)]

    def end(self, response: Mapping[str, Any]) -> WireEvents:
        (item,) = response["output"]
        (part,) = item["content"]
        done = {**self._place(), "text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", done),
            ("response.content_part.done", {**self._place(), "part": part}),
            ("response.output_item.done", {"output_index": 0, "item": item}),
        ]

    def equals(self, response: Mapping[str, Any]) -> bool:
        text: str = response["output"][0]["content"][0]["text"]
        return "".join(self._said) == text

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}


class _Parts:
    """A reply that may have reasoning and calls beside its content."""

    def __init__(self, turn_id: str, template: TemplateInput, texts: TokenTexts) -> None:
        self._parser = new_parser(template)
        self._found = ReplyItems(turn_id, template)
        self._texts = texts
        self._waiting: list[TokenLogprob] = []  # of tokens since the last event
        self._rest: WireEvents | None = None  # the events of the end

    @property
    def items(self) -> list[Item]:
        return self._found.items

    def begin(self) -> WireEvents:
        return []

    def add(self, piece: TextPiece) -> WireEvents:
        self._waiting += piece.logprobs
        events = self._take(self._parser.feed(piece.text))
        if not self._parser.holds_content:  # its text is not content, or was shown
            self._waiting.clear()
        return events

    def end(self, response: Mapping[str, Any]) -> WireEvents:
        events = self._rest
        if events is None:
            events = self._take(self._parser.end())
            if not self.items:
                events += self._open(ContentText(""))
            events += self._close(response["status"])
            self.items[-1]["status"] = response["status"]
            self._rest = events
        return events

    def equals(self, response: Mapping[str, Any]) -> bool:
        self.end(response)
        return self.items == response["output"]

    def _take(self, found: Iterable[ReplyEvent]) -> WireEvents:
        events: WireEvents = []
        for one in found:
            if self._found.opens(one):
                events += self._close("completed")
                events += self._open(one)
            self._found.add(one)
            events += self._delta(one)
            if isinstance(one, CallEnded):
                events += self._close("completed")
        return events

    def _open(self, event: ReplyEvent) -> WireEvents:
        item = self._found.open(event)
        place = {"output_index": len(self.items) - 1}
        if isinstance(event, CallBegun):
            return [("response.output_item.added", {**place, "item": dict(item)})]
        (part,) = item["content"]
        return [
            ("response.output_item.added", {**place, "item": {**item, "content": []}}),
            ("response.content_part.added", {**self._place(), "part": dict(part)}),
        ]

    def _delta(self, event: ReplyEvent) -> WireEvents:
        logprobs, self._waiting = self._waiting, []
        if isinstance(event, ContentText):
            objects = logprob_objects(self._texts, logprobs)
            self.items[-1]["content"][0]["logprobs"] += objects
            fields = {**self._place(), "delta": event.text, "logprobs": objects}
            return [("response.output_text.delta", fields)]
        if isinstance(event, ReasoningText):
            return [("response.reasoning_text.delta", {**self._place(), "delta": event.text})]
        if isinstance(event, ArgumentText):
            fields = {**self._call_place(), "delta": event.text}
            return [("response.function_call_arguments.delta", fields)]
        return []

    def _close(self, status: str) -> WireEvents:
        item = self._found.close(status)
        if item is None:
            return []
        done = ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})
        if item["type"] == "function_call":
            fields = {**self._call_place(), "name": item["name"], "arguments": item["arguments"]}
            return [("response.function_call_arguments.done", fields), done]
        (part,) = item["content"]
        fields = {**self._place(), "text": part["text"]}
        kind = "reasoning_text"
        if item["type"] == "message":
            kind, fields["logprobs"] = "output_text", part["logprobs"]
        return [
            (f"response.{kind}.done", fields),
            ("response.content_part.done", {**self._place(), "part": part}),
            done,
        ]

    def _place(self) -> dict[str, Any]:
        return {**self._call_place(), "content_index": 0}

    def _call_place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def logprob_objects(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Convert log-probabilities to the form of the Responses API."""
    return [
        {
            **_token_logprob(texts, one.token_id, one.logprob),
            "top_logprobs": [_token_logprob(texts, *pair) for pair in one.top.items()],
        }
        for one in logprobs
    ]


def _token_logprob(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "bytes": texts.raw(token_id) or [], "logprob": logprob}
