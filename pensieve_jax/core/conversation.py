"""A conversation's tokens: the committed ones, and those that the turn in progress has added.

Owns: the one list of token ids that every turn appends to, how much of it is history, and which names callers
may give conversations.
Does not know: where the KV state is (`cache`), how turns are scheduled, or how history is stored.
Called by: engines, and code that takes conversation names from callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from pensieve_jax.core.options import is_utf8

PENDING_TOKEN = -1  # placeholder in `token_ids` for a sampled id that was not fetched from the device yet


@dataclass(eq=False, slots=True)
class Conversation:
    """One conversation.

    Attributes:
      conversation_id: unique name; one-off requests have one that callers cannot use.
      token_ids: history, then the running turn's prompt and reply. The last id may be `PENDING_TOKEN`.
      num_history_tokens: number of ids of committed turns; cancelling cuts `token_ids` back to this.
      num_computed_tokens: number of history tokens whose KV was computed once. The last sampled token of a
        turn is not among them, so the next turn's query starts there.
      num_turns: number of committed turns.
      head: the last committed turn of the history; None without one, or if callers place turns.
      one_off: whether it stays out of the history; its state is freed when its only turn ends.
      replaced: ids at the end of the history that the turn in progress replaces; see `replace_from`.
      num_replaced_computed: number of these whose KV was computed once.
    """

    conversation_id: str
    token_ids: list[int] = field(default_factory=list)
    num_history_tokens: int = 0
    num_computed_tokens: int = 0
    num_turns: int = 0
    head: str | None = None
    one_off: bool = False
    replaced: list[int] = field(default_factory=list)
    num_replaced_computed: int = 0

    @property
    def num_committed_tokens(self) -> int:
        """Number of ids of the committed turns, including those that the turn in progress replaces."""
        return self.num_history_tokens + len(self.replaced)

    @property
    def committed_token_ids(self) -> list[int]:
        """All ids of the committed turns, whatever the turn in progress replaces."""
        return self.token_ids[: self.num_history_tokens] + self.replaced

    def replace_from(self, num_tokens: int) -> None:
        """Begin a turn that keeps the first `num_tokens` ids of the history and replaces the others.

        Until the turn is committed, they count as history no more; `rollback` restores them.
        """
        self.replaced = self.token_ids[num_tokens : self.num_history_tokens]
        del self.token_ids[num_tokens:]
        self.num_history_tokens = num_tokens
        self.num_replaced_computed = max(self.num_computed_tokens - num_tokens, 0)
        self.num_computed_tokens -= self.num_replaced_computed

    def rollback(self) -> None:
        """Remove the turn in progress, as if it had never been sent."""
        del self.token_ids[self.num_history_tokens :]
        self.token_ids += self.replaced
        self.num_history_tokens += len(self.replaced)
        self.num_computed_tokens += self.num_replaced_computed
        self.replaced, self.num_replaced_computed = [], 0

    def commit(self) -> None:
        """Make the turn in progress history. The last token of its reply has no KV yet."""
        self.replaced, self.num_replaced_computed = [], 0
        self.num_history_tokens = len(self.token_ids)
        self.num_computed_tokens = max(self.num_history_tokens - 1, 0)
        self.num_turns += 1

    def truncate(self, num_tokens: int, num_turns: int) -> None:
        """Keep the first `num_tokens` tokens of the history, which hold `num_turns` turns."""
        del self.token_ids[num_tokens:]
        self.num_history_tokens = num_tokens
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.num_turns = num_turns

    def extend_history(self, token_ids: Sequence[int]) -> None:
        """Append tokens of committed turns whose KV was computed once, but for the last one."""
        if token_ids:
            self.token_ids += token_ids
            self.num_history_tokens = len(self.token_ids)
            self.num_computed_tokens = self.num_history_tokens - 1


def is_conversation_id(value: object) -> TypeGuard[str]:
    """Return whether a caller may use this conversation name: non-empty UTF-8 text without NUL."""
    return isinstance(value, str) and value != "" and "\0" not in value and is_utf8(value)
