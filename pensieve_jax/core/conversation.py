"""A conversation's raw tokens: what was committed, and what the turn in progress has added.

Owns: the one list of token ids that every turn appends to, how much of it is history, and what a caller may
call it.
Does not know: where the KV state is (`cache`), how turns are scheduled, or how history is stored.
Whoever takes names from callers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

from pensieve_jax.core.options import is_utf8

PENDING_TOKEN = -1  # stands in `token_ids` for an id that was sampled but not fetched from the device yet


@dataclass(eq=False, slots=True)
class Conversation:
    """One conversation.

    Attributes:
      conversation_id: unique name; one-off requests get one that no caller can give.
      token_ids: history, then the running turn's prompt and reply. The last id may be `PENDING_TOKEN`.
      num_history_tokens: ids that committed turns left; cancelling cuts `token_ids` back to this.
      num_computed_tokens: history tokens whose KV was computed once. The last sampled token of a turn was
        not, so that the next turn's query starts there.
      num_turns: committed turns.
      head: the turn of the history that was committed last; None for none, or where turns are placed.
      one_off: not in the history; its state is freed when its only turn ends.
    """

    conversation_id: str
    token_ids: list[int] = field(default_factory=list)
    num_history_tokens: int = 0
    num_computed_tokens: int = 0
    num_turns: int = 0
    head: str | None = None
    one_off: bool = False

    def rollback(self) -> None:
        """Forget the turn in progress, as if it had never been sent."""
        del self.token_ids[self.num_history_tokens :]

    def commit(self) -> None:
        """Make the turn in progress history. The last token of a reply has no KV yet."""
        self.num_history_tokens = len(self.token_ids)
        self.num_computed_tokens = max(self.num_history_tokens - 1, 0)
        self.num_turns += 1

    def truncate(self, num_tokens: int, num_turns: int) -> None:
        """Keep the first `num_tokens` tokens of the history, which `num_turns` turns began."""
        del self.token_ids[num_tokens:]
        self.num_history_tokens = num_tokens
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.num_turns = num_turns


def is_conversation_id(value: object) -> TypeGuard[str]:
    """Whether a caller may name a conversation so: a non-empty string of UTF-8 without NUL."""
    return isinstance(value, str) and value != "" and "\0" not in value and is_utf8(value)
