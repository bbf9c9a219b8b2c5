"""A handle of a prefix that conversations share; the engine finds its KV state by its tokens.

Owns: the prefix's tokens, and whether it may still be given to a turn.
Does not know: where its KV state is, or which conversations begin with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pensieve_jax.core.template_input import NO_INPUT, TemplateInput


@dataclass(eq=False, slots=True, repr=False)
class SharedPrefix:
    """The result of `LLM.share_prefix`, to be given with the first turn of conversations.

    Attributes:
      token_ids: the tokens that such a conversation begins with; their full chunks are computed and stored
        once.
      messages: the chat messages that they were rendered from; None for text or ids.
      released: whether `LLM.release_prefix` was called; then turns no longer accept it.
      template_input: what they were rendered from beside the messages.
    """

    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] | None = None
    released: bool = False
    template_input: TemplateInput = NO_INPUT

    def __repr__(self) -> str:
        """Return a short text: the prefix may have thousands of tokens, and errors show it."""
        return f"SharedPrefix({len(self.token_ids)} tokens)"
