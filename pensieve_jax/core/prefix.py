"""A beginning that conversations share, as a handle: the engine finds its KV state by its tokens.

Owns: what it begins with, and whether it may still be given to a turn.
Does not know: where its state is, or who began with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True, repr=False)
class SharedPrefix:
    """What `LLM.share_prefix` returns, to be given with the first turn of conversations.

    Attributes:
      token_ids: with which such a conversation begins; its full chunks are computed and kept once.
      messages: the chat messages that they were rendered from; None for text or ids.
      released: `LLM.release_prefix` was called: no turn takes it any more.
    """

    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] | None = None
    released: bool = False

    def __repr__(self) -> str:
        """Short: it may have thousands of tokens, and errors show it."""
        return f"SharedPrefix({len(self.token_ids)} tokens)"
