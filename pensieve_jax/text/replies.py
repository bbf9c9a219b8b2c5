"""From the text of a finished reply to the message of the assistant that later turns are rendered from.

Owns: the parts of a reply's message, and the ids of its tool calls.
Does not know: templates, or where a reply is stored.

A stored turn has the text that the model wrote, marks included. Its message is read from that text whenever
it is needed, so that both cannot differ. Therefore the ids of calls follow from the turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from pensieve_jax.core.template_input import NO_INPUT, ReplyFormat, TemplateInput
from pensieve_jax.text.messages import Message
from pensieve_jax.text.reply_events import parsed_reply
from pensieve_jax.text.reply_parser import ReplyParser
from pensieve_jax.text.tokenizer import Tokenizer
from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS


class ReplyParts(NamedTuple):
    """The parts of a reply.

    Attributes:
      content: the text for the user.
      reasoning: the text before it that the model wrote between its marks of reasoning; "" without them.
      calls: the tool calls; their arguments are text, as the model wrote them.
    """

    content: str
    reasoning: str = ""
    calls: Sequence[ReplyCall] = ()


class ReplyCall(NamedTuple):
    """A tool call of a reply: its id, its name, and its arguments as text."""

    call_id: str
    name: str
    arguments: str


class ReplyReader:
    """The reading of one model's replies. It stores nothing between calls; threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def message(
        self,
        text: str | None,
        token_ids: Sequence[int],
        template: TemplateInput = NO_INPUT,
        *,
        turn: str = "",
    ) -> Message:
        """Return the assistant's message of a finished reply; a prefill is its beginning.

        Args:
          text: the reply as text; None if only the ids are known.
          token_ids: its ids.
          template: what its turn was rendered with.
          turn: a name of its turn that no other turn of the conversation has, for the ids of calls.
        """
        if text is None:
            text = "" if self._tokenizer is None else self._tokenizer.decode(token_ids)
        parts = self.parts((template.prefill or "") + text, template, turn=turn)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.reasoning:
            message["reasoning"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in parts.calls
            ]
        return message

    def parts(self, text: str, template: TemplateInput, *, turn: str = "") -> ReplyParts:
        """Return the parts of a reply's text, prefill included; see `message` for `turn`."""
        if not has_parts(template):
            return ReplyParts(text)
        parser = reply_parser(template)
        found = parsed_reply([*parser.feed(text), *parser.end()])
        calls = tuple(
            ReplyCall(call_id(template.reply, turn, index, call.header), call.name, call.arguments)
            for index, call in enumerate(found.calls)
        )
        return ReplyParts(found.content, found.reasoning, calls)


def has_parts(template: TemplateInput) -> bool:
    """Return whether a turn's reply may have parts beside its content."""
    return bool(template.reply.calls or template.reply.reasoning)


def reply_parser(template: TemplateInput) -> ReplyParser:
    """Return the parser of a turn's reply at its beginning, before a prefill."""
    reply = template.reply
    return ReplyParser(
        TOOL_FORMATS[reply.calls] if reply.calls else None,
        REASONING_FORMATS[reply.reasoning] if reply.reasoning else None,
        is_open=reply.is_open,
        schemas={tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in template.tools},
        max_calls=1 if reply.has_one_call else None,
    )


def shown_marks(template: TemplateInput) -> tuple[str, ...]:
    """Return the marks that the text of a turn's reply shows even if they are control tokens."""
    reply = template.reply
    calls = TOOL_FORMATS[reply.calls].marks if reply.calls else ()
    reasoning = REASONING_FORMATS[reply.reasoning].marks if reply.reasoning else ()
    return tuple(dict.fromkeys((*calls, *reasoning)))


def call_id(reply: ReplyFormat, turn: str, index: int, header: str) -> str:
    """Return the id of the call at position `index` of a turn's reply.

    It is "call_" and 24 hexadecimal digits, or what the templates of its format demand: nine letters and
    digits, or the header that the model wrote.
    """
    digits = hashlib.sha256(f"{turn}/{index}".encode()).hexdigest()
    form = TOOL_FORMATS[reply.calls].id_form
    if form == "header" and header:
        return header
    return digits[:9] if form == "short" else f"call_{digits[:24]}"
