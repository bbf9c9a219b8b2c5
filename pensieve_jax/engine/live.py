"""Records of conversations in memory: tokens, cached sequence, and path in a tree of turns.

Owns: the record types.
Does not know: which conversations are in memory, or for how long.
Called by `ConversationTable`, `BranchTable`, the submission of turns, and the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve_jax.cache import CachedSequence
from pensieve_jax.core.conversation import Conversation


class TurnEnd(NamedTuple):
    """End of a turn, in tokens from the root of its tree, and whether the history has stored the turn."""

    num_tokens: int
    durable: bool


@dataclass(eq=False, slots=True)
class LiveConversation:
    """A conversation in memory: its tokens, its cached sequence, and whether a turn is in progress."""

    conversation: Conversation
    sequence: CachedSequence
    busy: bool = False


@dataclass(eq=False, slots=True)
class Branch(LiveConversation):
    """A conversation that is a path in a tree of turns; its caller names the turn that each turn continues.

    Attributes:
      owner: owner of the tree.
      path: answered turns by id, from the root to the latest.
      hashes: hashes of its full chunks; see `chunk_index`.
    """

    owner: str = ""
    path: dict[str, TurnEnd] = field(default_factory=dict)
    hashes: list[int] = field(default_factory=list)

    @property
    def tip(self) -> str | None:
        """Id of the latest answered turn; None before the first."""
        return next(reversed(self.path), None)

    @property
    def known_tokens(self) -> list[int]:
        """Tokens of all turns on the path."""
        return self.conversation.token_ids[: self.conversation.num_history_tokens]
