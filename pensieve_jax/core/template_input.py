"""What a chat template gets beside the messages: tools, arguments, and the beginning of the reply.

Owns: this value, and its packing for the history.
Does not know: templates, messages, which tools are well-formed, or which of these values a template reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The input of a chat template beside the messages.

    Attributes:
      tools: function tools, as `text.tools.check_tools` returns them; empty without tools.
      arguments: further variables of the template by name, such as {"enable_thinking": False}.
      prefill: text with which the assistant's reply begins; None for a reply without a given beginning.
      generation_prompt: whether the template writes the opening of a reply. A prefill comes with its own.
    """

    tools: tuple[dict[str, Any], ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    prefill: str | None = None
    generation_prompt: bool = True

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
        return packed

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> TemplateInput:
        """Return the inverse of `packed`; other keys are ignored."""
        return cls(
            tools=tuple(packed.get("tools", ())),
            arguments=packed.get("arguments", {}),
            prefill=packed.get("prefill"),
            generation_prompt=packed.get("generation_prompt", True),
        )


NO_INPUT: Final = TemplateInput()
