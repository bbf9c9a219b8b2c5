"""A beginning that conversations share, as a value: the engine finds its KV state by its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What `LLM.share_prefix` returns, to be given with the first turn of conversations.

    Attributes:
      token_ids: with which such a conversation begins; its full chunks are computed and kept once.
    """

    token_ids: tuple[int, ...]
