"""What a durable history is: turns in trees, and the protocol of a store that keeps them.

Owns: `TurnRecord`, `ConversationRecord`, `ConversationInfo`, `HistoryStore` and what its methods promise.
Does not know: any file format, jax, or KV state.

A turn never changes once it is committed, and goes on from another one or begins a tree. A named conversation
is a name for the turn at its head: the path to that turn, from the first of its tree on, is what was said in
it. Turns that their caller places (`core.turn_node`) are in no named conversation and belong to an owner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Usage
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.text.messages import Message

CUT_FINISH_REASON: Final = "truncated"
"""`finish_reason` of a turn that `truncate` has cut; a turn that ran to its end never has it."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn as it is kept: what was sent, what was answered, and what it takes to repeat it.

    Attributes:
      conversation_id: any non-empty string; "" for a turn that its caller placed.
      turn_index: 0 for the first turn of a path; the next turn has the next number.
      prompt_token_ids: the new ids of the turn only, as they stood in the history (chat markup included).
      output_token_ids: every sampled id up to and including the one that ended the turn.
      seed: the 64-bit sampling seed, drawn or given.
      finish_reason: "stop", "length", ..., or `CUT_FINISH_REASON`.
      created_at_s: wall clock of the turn's end in seconds since the epoch; the caller reads the clock.
      messages: the new chat messages of the turn; None for a turn that was sent as text or ids.
      output_text: the reply as it was shown (without the stop string); None without a tokenizer or once cut.
      turn_id, parent_id: of the turn and of the one that it goes on from; see `core.turn_node`. The store
        gives them to turns of named conversations that come with "" and None; one that comes with its own
        says from which head it goes on.
      owner: whose it is; "" for named conversations.
      chain: what identifies the messages up to and including this turn's own; b"" for a turn without.
      usage: where its tokens came from; None if that was never kept.
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
    turn_id: str = ""
    parent_id: str | None = None
    owner: str = ""
    chain: bytes = b""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ConversationRecord:
    """A whole conversation, or the path to a turn.

    Attributes:
      conversation_id: its name; of a path, the id of its last turn.
      token_ids: i32[num_tokens], all prompts and replies in order.
      turns: in order; empty after `truncate(conversation_id, 0)`.
      last_active_s: `created_at_s` of the turn that was committed last, or when it was forked, if that was
        later; of a path, of its last turn.
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


class Cut(NamedTuple):
    """What `truncate` and `fork` found and made.

    Attributes:
      num_turns: of the path to the new head, one that was cut through included.
      head: the turn that the conversation, or its fork, ends with now; None for an empty one.
      head_before: the turn that the conversation ended with.
    """

    num_turns: int
    head: str | None
    head_before: str | None


class HistoryStore(Protocol):
    """Keeps turns; opened for one model and tokenizer.

    Attributes:
      is_shared: other processes may change it at any time: what is in memory of a conversation may be behind.

    Threads: the engine thread calls everything; `conversations`, `info`, `load`, `load_turn` and `has_turn`
    may also be called from other threads at any time and see either all of a commit or nothing of it.
    """

    @property
    def is_shared(self) -> bool: ...

    def conversations(self) -> list[ConversationInfo]:
        """All named conversations, the most recently active first, equal times by id."""
        ...

    def idle(self, before_s: float | None, num_kept: int | None, busy: Collection[str] = ()) -> list[str]:
        """Named conversations that are not `busy`, and were last active before a time or are too many.

        Too many are those behind the first `num_kept` of the listing without the busy ones. None: by the
        other rule only. Made without a listing, as every submission may ask.
        """
        ...

    def info(self, conversation_id: str) -> ConversationInfo:
        """A conversation's line of the listing.

        Raises UnknownConversationError, or InvalidRequestError for a name that no conversation can have.
        """
        ...

    def head(self, conversation_id: str) -> str | None:
        """The turn that a conversation ends with; None of an empty one; raises UnknownConversationError."""
        ...

    def load(self, conversation_id: str) -> ConversationRecord:
        """Read a whole conversation; raises UnknownConversationError."""
        ...

    def load_turn(self, owner: str, turn_id: str) -> ConversationRecord:
        """Read the path to a turn, from the first of its tree; raises UnknownTurnError."""
        ...

    def has_turn(self, owner: str, turn_id: str) -> bool:
        """Whether it still keeps a turn."""
        ...

    def commit(
        self,
        turns: Sequence[TurnRecord],
        attachments: Sequence[object] = (),
        in_use: Collection[str] = (),
    ) -> Mapping[int, PensieveError]:
        """Append finished turns in ONE transaction, each with what was attached to it.

        Once it returns, the turns outlive the process, and so does what stands in their attachments
        (`changes.ResponseDraft`, or None; none at all: no turn has one). A turn with a conversation_id goes
        behind that conversation's last one, and begins it if it is turn 0; if it has an id, only where that
        last one is its parent. Any other turn goes where its own ids say. For `in_use` see `apply`.

        Returns why turns were refused, by position: turns with ids can be overtaken, since what they go on
        from, or what they are to be appended to, may have gone or changed. Nothing of a refused turn is
        kept, and all of the others: ConversationChangedError, UnknownRecordError, UnknownTurnError, or
        InvalidRequestError for an attachment that cannot be kept.

        Raises InvalidRequestError, before anything is written, for a value of a turn that cannot be kept or
        a `turn_index` that is not the path's next, and HistoryError; then nothing is kept, unless that says
        that nobody knows (`HistoryUnavailableError.may_be_kept`).
        """
        ...

    def apply(self, change: HistoryChange, in_use: Collection[str] = ()) -> None:
        """Change what is kept beside turns, in one transaction.

        Turns that nothing needs any more go with it. Those `in_use`, from which running turns go on, stay
        until an `Expire` finds that they are not.
        Raises UnknownRecordError, ConversationChangedError, InvalidRequestError or HistoryError.
        """
        ...

    def truncate(self, conversation_id: str, num_tokens: int) -> Cut:
        """Keep the first `num_tokens` tokens of a conversation; 0 leaves it empty, not deleted.

        A turn that the cut goes through is replaced by one of the part before it, with `finish_reason =
        CUT_FINISH_REASON` and `output_text = None`; cut within its prompt that also has no `messages`, which
        are no longer what the ids say. Raises UnknownConversationError, and InvalidRequestError if there are
        fewer tokens.
        """
        ...

    def fork(
        self,
        conversation_id: str,
        new_conversation_id: str,
        num_tokens: int | None = None,
        *,
        at_s: float | None = None,
    ) -> Cut:
        """Have a new conversation begin as the first `num_tokens` tokens (None: all) of another one.

        They share what they have in common, but a turn that is cut through as `truncate` would. The new one
        was last active at `at_s` (None: when the other one was). Raises UnknownConversationError, and
        InvalidRequestError for a new name that is taken or a length that the conversation does not have.
        """
        ...

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation, and the turns that no other needs; raises UnknownConversationError."""
        ...

    def note(self, name: str) -> str | None:
        """A text that is kept beside the turns; None where there is none of that name."""
        ...

    def keep_note(self, name: str, text: str | None) -> None:
        """Keep a text in place of the one of that name; None removes it."""
        ...

    def close(self) -> None:
        """Release file, lock or connections; any later call but `close` raises HistoryError."""
        ...
