"""What stands in memory of a conversation: its tokens, its cached state, and where in a tree of turns it is.

Owns: the values. Does not know: who is in memory, or for how long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve_jax.cache import CachedSequence
from pensieve_jax.core.conversation import Conversation


class TurnEnd(NamedTuple):
    """Where a turn of a branch ends, in tokens from the first of its tree; whether the history has it too."""

    num_tokens: int
    durable: bool


@dataclass(eq=False, slots=True)
class LiveConversation:
    """A conversation in memory: its tokens, its cached state, and whether a turn of it runs."""

    conversation: Conversation
    sequence: CachedSequence
    busy: bool = False


@dataclass(eq=False, slots=True)
class Branch(LiveConversation):
    """A conversation whose turns are placed by their caller: a path in a tree of turns.

    Attributes:
      owner: whose it is.
      path: turns from the first one on, in order, by id; that in progress is not among them.
      hashes: see `chunk_index`.
    """

    owner: str = ""
    path: dict[str, TurnEnd] = field(default_factory=dict)
    hashes: list[int] = field(default_factory=list)

    @property
    def tip(self) -> str | None:
        """Id of the latest turn that has ended; None if there is none."""
        return next(reversed(self.path), None)

    @property
    def known_tokens(self) -> list[int]:
        """Of all turns on the path."""
        return self.conversation.token_ids[: self.conversation.num_history_tokens]
