"""Records of conversations in memory: tokens, cached sequence, and path in a tree of turns.

Owns: the record types.
Does not know: which conversations are in memory, or for how long.
Called by `ConversationTable`, `BranchTable`, the submission of turns, and the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve_jax.cache import CachedSequence
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.token_ids import num_equal


class TurnEnd(NamedTuple):
    """The context at the end of a turn on a branch.

    Attributes:
      num_shared: number of leading tokens of the branch that the context has.
      durable: whether the history has stored the turn.
      tail: the rest of the context, which a later turn on the branch has replaced.
    """

    num_shared: int
    durable: bool
    tail: tuple[int, ...] = ()


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
    def root(self) -> str | None:
        """Id of the first turn; None before the first answer."""
        return next(iter(self.path), None)

    @property
    def tip(self) -> str | None:
        """Id of the latest answered turn; None before the first."""
        return next(reversed(self.path), None)

    @property
    def known_tokens(self) -> list[int]:
        """Tokens of all turns on the path, without those that the turn in progress replaces."""
        return self.conversation.token_ids[: self.conversation.num_history_tokens]

    def context_of(self, turn_id: str) -> list[int]:
        """Return all tokens up to the end of a turn on the path."""
        end = self.path[turn_id]
        return [*self.conversation.committed_token_ids[: end.num_shared], *end.tail]

    def path_to(self, turn_id: str) -> dict[str, TurnEnd]:
        """Return the path up to a turn, as that of a branch with the tokens `context_of(turn_id)`."""
        path: dict[str, TurnEnd] = {}
        num_shared, _, tail = self.path[turn_id]
        for name, end in self.path.items():
            # An earlier turn's context can share more with this one than both share with the branch.
            if end.tail and end.num_shared == num_shared:
                num_same = num_equal(end.tail, tail)
                end = TurnEnd(num_shared + num_same, end.durable, end.tail[num_same:])
            path[name] = end
            if name == turn_id:
                break
        return path


def replace_tokens(path: dict[str, TurnEnd], keep: int, replaced: Sequence[int]) -> None:
    """Update the path of a branch whose tokens from `keep` on were `replaced` by those of a new turn."""
    for turn_id, (num_shared, durable, tail) in path.items():
        if num_shared > keep:
            path[turn_id] = TurnEnd(keep, durable, (*replaced[: num_shared - keep], *tail))
