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

from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.text.messages import Message
from pensieve_jax.text.tokenizer import Tokenizer


class ReplyParts(NamedTuple):
    """The parts of a reply.

    Attributes:
      content: the text for the user.
      reasoning: the text before it that the model wrote between its marks of reasoning; "" without them.
      calls: name and arguments of each tool call; arguments are text, as the model wrote them.
    """

    content: str
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()


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
        parts = self.parts((template.prefill or "") + text, template)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.reasoning:
            message["reasoning"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [
                {
                    "id": call_id(turn, index),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(parts.calls)
            ]
        return message

    def parts(self, text: str, template: TemplateInput) -> ReplyParts:
        """Return the parts of a reply's text, prefill included."""
        return ReplyParts(text)


def call_id(turn: str, index: int) -> str:
    """Return the id of the call at position `index` of a turn's reply: "call_" and 24 hexadecimal digits."""
    return f"call_{hashlib.sha256(f'{turn}/{index}'.encode()).hexdigest()[:24]}"
