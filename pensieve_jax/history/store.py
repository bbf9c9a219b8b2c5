"""The durable history: turns in trees, and the protocol of a store for them.

Owns: `TurnRecord`, `ConversationRecord`, `ConversationInfo`, `HistoryStore` and the contracts of its methods.
Does not know: any file format, jax, or KV state.

A turn never changes once it is committed; it continues another turn or begins a tree. A named conversation is
a name for the turn at its head: the path to that turn, from the first of its tree, is the conversation. Turns
that their caller places (`core.turn_node`) are in no named conversation and belong to an owner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import TokenLogprob, Usage
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.text.messages import Message

CUT_FINISH_REASON: Final = "truncated"
"""`finish_reason` of a turn that `truncate` has cut; other turns never have it."""


LOCK_WAIT_S: Final = 5.0
"""How long a change waits for a lock of another program, such as a backup tool."""


type TurnKey = tuple[str, str]
"""Owner and id of a turn."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One stored turn: its prompt, its reply, and what is needed to repeat it.

    Attributes:
      conversation_id: any non-empty string; "" for a turn that its caller placed.
      turn_index: 0 for the first turn of a path; the next turn has the next number.
      prompt_token_ids: the new ids of the turn only, as they are in the history (chat markup included).
      output_token_ids: every sampled id up to and including the one that ended the turn.
      seed: the 64-bit sampling seed, drawn or given.
      finish_reason: "stop", "length", ..., or `CUT_FINISH_REASON`.
      created_at_s: wall clock of the turn's end in seconds since the epoch; the caller reads the clock.
      messages: the new chat messages of the turn; None for a turn that was sent as text or ids.
      output_text: the reply as shown (without the stop string); None without a tokenizer or after a cut.
      turn_id, parent_id: ids of the turn and of the turn that it continues; see `core.turn_node`. Turns of
        named conversations may have "" and None, and the store assigns ids. If they have ids, `parent_id`
        is the head that they continue.
      owner: owner of the turn; "" for named conversations.
      chain: digest that identifies the messages up to and including this turn's own; b"" without one.
      usage: where its tokens came from; None if that was not stored.
      logprobs: one entry for each token of the reply if they were requested. They are stored with the
        response that is attached to the turn, and not without one; turns that are read have None.
      keep: number of leading tokens of the path before it that its own tokens follow; they replace the
        others. None: all.
      template_input: what the prompt was rendered from beside the messages. It is stored with messages only.
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
    logprobs: tuple[TokenLogprob, ...] | None = None
    keep: int | None = None
    template_input: TemplateInput = NO_INPUT


@dataclass(frozen=True, slots=True, eq=False)
class ConversationRecord:
    """A whole conversation, or the path to a turn.

    Attributes:
      conversation_id: name of the conversation; for a path, the id of its last turn.
      token_ids: i32[num_tokens], all prompts and replies in order, without what later turns replaced.
      turns: in order; empty after `truncate(conversation_id, 0)`.
      last_active_s: `created_at_s` of the turn that was committed last, or the time of the fork, if later;
        for a path, `created_at_s` of its last turn.
    """

    conversation_id: str
    token_ids: NDArray[np.int32]
    turns: tuple[TurnRecord, ...]
    last_active_s: float


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A line of the listing, made without reading any token."""

    conversation_id: str
    num_tokens: int
    num_turns: int
    last_active_s: float


class Cut(NamedTuple):
    """The result of `truncate` and `fork`.

    Attributes:
      num_turns: number of turns on the path to the new head, including a turn that was cut.
      head: the new last turn of the conversation or its fork; None for an empty one.
      head_before: the last turn of the conversation before.
      num_tokens: number of tokens of the conversation or its fork.
    """

    num_turns: int
    head: str | None
    head_before: str | None
    num_tokens: int


class HistoryStore(Protocol):
    """A store of turns for one model and tokenizer.

    Attributes:
      is_shared: whether other processes may change the history at any time, so that copies of a conversation
        in memory may be out of date.
      lock_wait_s: how long a change waits for another program's lock before it raises HistoryBusyError.
        `commit` never waits.
      is_damaged: whether the history was found damaged since it was opened. It then refuses every change.

    Threads: the engine thread calls everything; `conversations`, `info`, `load`, `load_turn` and `has_turn`
    may also be called from other threads at any time and see either all of a commit or nothing of it.
    """

    lock_wait_s: float
    is_damaged: bool

    @property
    def is_shared(self) -> bool: ...

    def conversations(self) -> list[ConversationInfo]:
        """Return all named conversations, the most recently active first, equal times by id."""
        ...

    def idle(self, before_s: float | None, num_kept: int | None, busy: Collection[str] = ()) -> list[str]:
        """Return named conversations, not `busy`, that were last active before `before_s` or are too many.

        Too many are those after the first `num_kept` of the listing without the busy ones. None switches a
        rule off. Works without a full listing, since every submission may call it.
        """
        ...

    def info(self, conversation_id: str) -> ConversationInfo:
        """Return a conversation's line of the listing.

        Raises UnknownConversationError, or InvalidRequestError for a name that no conversation can have.
        """
        ...

    def head(self, conversation_id: str) -> str | None:
        """Return the last turn of a conversation, None if it is empty; raise UnknownConversationError."""
        ...

    def load(self, conversation_id: str) -> ConversationRecord:
        """Read a whole conversation; raise UnknownConversationError."""
        ...

    def load_turn(self, owner: str, turn_id: str) -> ConversationRecord:
        """Read the path to a turn, from the first of its tree; raise UnknownTurnError."""
        ...

    def has_turn(self, owner: str, turn_id: str) -> bool:
        """Return whether the store still has a turn."""
        ...

    def commit(
        self,
        turns: Sequence[TurnRecord],
        attachments: Sequence[object] = (),
        in_use: Collection[str] = (),
    ) -> Mapping[int, PensieveError]:
        """Append finished turns in ONE transaction, each with its attachment.

        Once it returns, the turns survive the process, and so do their attachments (`changes.ResponseDraft`
        or None; an empty sequence means that no turn has one). A turn with a conversation_id is appended to
        that conversation, and begins it if it is turn 0. If such a turn has an id, its parent must be the
        conversation's last turn. Any other turn is placed by its own ids. For `in_use` see `apply`.

        Returns why turns were refused, by position. Turns with ids can be overtaken: the turn that they
        continue, or the conversation that they are appended to, may be deleted or changed. The reasons are
        ConversationChangedError, UnknownRecordError, UnknownTurnError, or InvalidRequestError for an
        attachment that cannot be stored. Nothing of a refused turn is stored; the others are stored.

        Raises InvalidRequestError, before anything is written, for a value of a turn that cannot be stored or
        a `turn_index` that is not the path's next. Raises HistoryError if nothing was stored, or if that is
        unknown (`HistoryUnavailableError.may_be_kept`). Never waits for a lock of another program: it raises
        HistoryBusyError, and the caller tries again.
        """
        ...

    def apply(self, change: HistoryChange, in_use: Collection[str] = ()) -> Sequence[TurnKey]:
        """Change data stored beside turns, in one transaction; return the turns that it removed.

        Turns that become unneeded are removed with it. Turns `in_use`, which running turns continue, stay
        until an `Expire` finds that they are not in use.
        Raises UnknownRecordError, ConversationChangedError, InvalidRequestError or HistoryError.
        """
        ...

    def truncate(self, conversation_id: str, num_tokens: int) -> Cut:
        """Keep the first `num_tokens` tokens of a conversation; 0 leaves it empty, not deleted.

        A turn that is cut is replaced by one with the part before the cut, with `finish_reason =
        CUT_FINISH_REASON` and `output_text = None`. If its prompt is cut, it also has no `messages`, since
        they would not match the ids. Raises UnknownConversationError, and InvalidRequestError if there are
        fewer tokens.
        """
        ...

    def truncate_turns(self, conversation_id: str, num_turns: int) -> Cut:
        """Keep the first `num_turns` turns of a conversation; 0 leaves it empty, not deleted.

        Its tokens are those at the end of the last of these turns, even if a later turn had replaced some.
        Raises UnknownConversationError, and InvalidRequestError if there are fewer turns.
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
        """Begin a new conversation with the first `num_tokens` tokens (None: all) of another one.

        They share their common turns, except a turn that is cut as in `truncate`. The new one was last active
        at `at_s` (None: when the other one was). Raises UnknownConversationError, and InvalidRequestError for
        a new name that is taken or a length that the conversation does not have.
        """
        ...

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation, and the turns that no other needs; raise UnknownConversationError."""
        ...

    def note(self, name: str) -> str | None:
        """Return a text stored beside the turns; None for an unknown name."""
        ...

    def keep_note(self, name: str, text: str | None) -> None:
        """Store a text in place of the one of that name; None removes it."""
        ...

    def close(self) -> None:
        """Release file, lock or connections; any later call except `close` raises HistoryError."""
        ...
