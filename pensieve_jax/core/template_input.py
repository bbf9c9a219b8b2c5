"""What a chat template gets beside the messages: tools, arguments, and the beginning of the reply.

Owns: these values, and their packing for the history.
Does not know: templates, messages, which tools are well-formed, or which of these values a template reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the text of a turn's reply is divided into parts.

    Attributes:
      calls: row of `text.tool_formats` for tool calls; "" if it is not known how the model writes them.
      reasoning: row for reasoning; "" reads it as content.
      is_open: whether the prompt ends with the mark that begins reasoning.
      max_calls: number of calls behind which the reply ends; None for any number. With 0, what the model
        writes is content, and a mark before calls that is one token is not sampled.
      has_form: whether the reply is held to a form from its content on, unless it is calls. Then marks within
        the content are text.
    """

    calls: str = ""
    reasoning: str = ""
    is_open: bool = False
    max_calls: int | None = None
    has_form: bool = False


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The input of a chat template beside the messages, and how the reply to it is read.

    Attributes:
      tools: function tools, as `text.tools.check_tools` returns them; empty without tools.
      arguments: further variables of the template by name, such as {"enable_thinking": False}.
      prefill: text with which the assistant's reply begins; None for a reply without a given beginning.
      generation_prompt: whether the template writes the opening of a reply. A prefill comes with its own.
      reply: how the reply is read. It is stored with the turn, so that later turns read it in the same way.
    """

    tools: tuple[dict[str, Any], ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    prefill: str | None = None
    generation_prompt: bool = True
    reply: ReplyFormat = ReplyFormat()

    def packed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, as JSON values."""
        packed: dict[str, Any] = {}
        if self.tools:
            packed["tools"] = list(self.tools)
        if self.arguments:
            packed["arguments"] = dict(self.arguments)
        if self.prefill is not None:
            packed["prefill"] = self.prefill
        if not self.generation_prompt:
            packed["generation_prompt"] = False
        if self.reply != ReplyFormat():
            plain = asdict(ReplyFormat())
            packed["reply"] = {
                name: value for name, value in asdict(self.reply).items() if value != plain[name]
            }
        return packed

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> TemplateInput:
        """Return the inverse of `packed`; other keys are ignored."""
        return cls(
            tools=tuple(packed.get("tools", ())),
            arguments=packed.get("arguments", {}),
            prefill=packed.get("prefill"),
            generation_prompt=packed.get("generation_prompt", True),
            reply=ReplyFormat(**packed.get("reply", {})),
        )


NO_INPUT: Final = TemplateInput()
