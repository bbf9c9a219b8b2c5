"""What a conversation's durable history is: its records and the protocol of a store that keeps them.

Owns: `TurnRecord`, `ConversationRecord`, `ConversationInfo`, `HistoryStore` and what its methods promise.
Does not know: any file format, jax, or KV state.
Called by: the engine; implemented by `sqlite_store.SQLiteHistoryStore`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from pensieve_jax.text.messages import Message

CUT_FINISH_REASON: Final = "truncated"
"""`finish_reason` of a turn that `truncate` has cut; a turn that ran to its end never has it."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn as it is kept: what was sent, what was answered, and what it takes to repeat it.

    Attributes:
      conversation_id: any non-empty string.
      turn_index: 0 for a conversation's first turn; the next turn has the next number.
      prompt_token_ids: the new ids of the turn only, as they stood in the history (chat markup included).
      output_token_ids: every sampled id up to and including the one that ended the turn.
      seed: the 64-bit sampling seed, drawn or given.
      finish_reason: "stop", "length", ..., or `CUT_FINISH_REASON`.
      created_at_s: wall clock of the turn's end in seconds since the epoch; the caller reads the clock.
      messages: the new chat messages of the turn; None for a turn that was sent as text or ids.
      output_text: the reply as it was shown (without the stop string); None without a tokenizer or once cut.
    """

    conversation_id: str
    turn_index: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    seed: int
    finish_reason: str
    created_at_s: float
    messages: tuple[Message, ...] | None = None
    output_text: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ConversationRecord:
    """A whole conversation.

    Attributes:
      conversation_id: its name.
      token_ids: i32[num_tokens], all prompts and replies in order.
      turns: in order; empty after `truncate(conversation_id, 0)`.
      last_active_s: `created_at_s` of the turn that was committed last.
    """

    conversation_id: str
    token_ids: NDArray[np.int32]
    turns: tuple[TurnRecord, ...]
    last_active_s: float


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A line of the listing; made without reading any token."""

    conversation_id: str
    num_tokens: int
    num_turns: int
    last_active_s: float


class HistoryStore(Protocol):
    """Keeps the turns of conversations; opened for one model and tokenizer by one process at a time.

    Threads: the engine thread calls everything; `conversations`, `info` and `load` may also be called from
    other threads at any time and see either all of a commit or nothing of it.
    """

    def conversations(self) -> list[ConversationInfo]:
        """All conversations, the most recently active first, equal times by id."""
        ...

    def info(self, conversation_id: str) -> ConversationInfo:
        """A conversation's line of the listing; raises UnknownConversationError."""
        ...

    def load(self, conversation_id: str) -> ConversationRecord:
        """Read a whole conversation; raises UnknownConversationError."""
        ...

    def load_turn(self, owner: str, turn_id: str) -> ConversationRecord:
        """Read the path to a turn, from the first of its tree; raises UnknownTurnError."""
        ...

    def commit(self, turns: Sequence[TurnRecord]) -> None:
        """Append finished turns (of one or many conversations) in ONE transaction: all of them or none.

        Once it returns, the turns outlive the process. A conversation begins with its turn 0. Raises
        InvalidRequestError, before anything is written, for a value that cannot be kept or a `turn_index`
        that is not the conversation's next.
        """
        ...

    def truncate(self, conversation_id: str, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens of a conversation; 0 leaves it empty, not deleted.

        Returns how many turns are left, one that was cut through included.

        A turn that the cut goes through keeps the part before it and gets `finish_reason = CUT_FINISH_REASON`
        and `output_text = None`; cut within its prompt it also loses its `messages`, which are no longer what
        the ids say. Raises UnknownConversationError, and InvalidRequestError if there are fewer tokens.
        """
        ...

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation; raises UnknownConversationError."""
        ...

    def note(self, name: str) -> str | None:
        """A text that is kept beside the turns; None where there is none of that name."""
        ...

    def keep_note(self, name: str, text: str | None) -> None:
        """Keep a text in place of the one of that name; None removes it."""
        ...

    def close(self) -> None:
        """Release file and lock; any later call but `close` raises HistoryError."""
        ...
