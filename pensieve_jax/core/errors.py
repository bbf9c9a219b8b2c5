"""The exceptions that a caller of the engine can meet. Each message says what to change.

Owns: the error classes, the wording of messages about a bad field, and which parts of an error may be stored.
Does not know: who raises them, or any value of the engine.

Raise an error before anything is scheduled or written, so that a bad request never harms other requests.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ChatTemplateError",
    "ClockAheadError",
    "ConfigError",
    "ContextLengthError",
    "ConversationBusyError",
    "ConversationChangedError",
    "EngineClosedError",
    "EngineDiedError",
    "HistoryBusyError",
    "HistoryCorruptError",
    "HistoryDeniedError",
    "HistoryError",
    "HistoryLockedError",
    "HistoryMismatchError",
    "HistoryUnavailableError",
    "InvalidFieldError",
    "InvalidRequestError",
    "LogitsError",
    "PensieveError",
    "StepFailedError",
    "StorageQuotaError",
    "TokenizerMissingError",
    "UnknownConversationError",
    "UnknownRecordError",
    "UnknownTurnError",
]


class _Short(reprlib.Repr):
    """Shortened values for messages."""

    def repr_int(self, value: int, level: int) -> str:
        """Return the number, or its size if it has more than the 4,300 digits that Python prints."""
        try:
            return super().repr_int(value, level)
        except ValueError:
            return f"a number of {value.bit_length()} bits"


_SHORT = _Short(maxstring=100)


class PensieveError(Exception):
    """Root of every error that this package raises on purpose.

    Attributes:
      outputs: if one of several requests of a call failed, the results of all of them in order, with None for
        each that failed; None if the call had only one request.
    """

    outputs: Sequence[Any] | None = None


class InvalidFieldError(PensieveError, ValueError):
    """A field with a value that cannot be used.

    The message reads `<field> is <value>, but must be <limit>; <hint>.`, so `limit` completes "must be"
    (for example "at least 1" or "an int from 0 to 49151") and `hint`, if given, says what to change.

    Attributes:
      field: dotted or indexed name of the field, for example "messages[2].role".
      value: the rejected value.
      limit: the accepted values, in words.
    """

    def __init__(self, field: str, value: object, limit: object, hint: str = "") -> None:
        """Build the message; `limit` completes "must be", and `hint` has no full stop."""
        self.field = field
        self.value = value
        self.limit = limit
        self.hint = hint
        # A prompt may be a list of 100,000 ids, so the message shows only the first and last ones.
        ending = f"; {hint}." if hint else "."
        super().__init__(f"{field} is {_SHORT.repr(value)}, but must be {limit}{ending}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.field, self.value, self.limit, self.hint)


class ConfigError(InvalidFieldError):
    """A configuration value that is unknown, impossible, or in conflict with another one."""


class InvalidRequestError(InvalidFieldError):
    """A prompt, message list or sampling parameter that cannot be served."""


class ContextLengthError(InvalidRequestError):
    """History and prompt leave no room for one new token within the context or the page pool.

    Attributes:
      num_tokens: tokens of history and prompt; None if more than these count, or if they were not counted.
      token_limit: the allowed number of these tokens.
    """

    def __init__(
        self,
        field: str,
        value: object,
        limit: object,
        hint: str = "",
        num_tokens: int | None = None,
        token_limit: int | None = None,
    ) -> None:
        super().__init__(field, value, limit, hint)
        self.num_tokens = num_tokens
        self.token_limit = token_limit

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments."""
        return type(self), (self.field, self.value, self.limit, self.hint, self.num_tokens, self.token_limit)


class UnsupportedGrammarError(InvalidRequestError):
    """A form of a reply that this installation or this model cannot hold a reply to."""


class GrammarTooComplexError(InvalidRequestError):
    """A form of a reply that exceeds the limits of compiling it or of its masks."""


class UnknownConversationError(PensieveError, KeyError):
    """An unknown conversation id.

    Attributes:
      conversation_id: the requested id.
    """

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        super().__init__(conversation_id)

    def __str__(self) -> str:
        """Return the message as a sentence; `KeyError` alone would show the bare id."""
        return (
            f"conversation_id is {self.conversation_id!r}, but no conversation of that id exists; "
            "start it with generate, stream or chat, or pick one that conversations() lists."
        )


class ConversationBusyError(PensieveError):
    """A turn of this conversation is running already, or one call names the conversation twice.

    Attributes:
      conversation_id: the requested id.
    """

    def __init__(
        self, conversation_id: str, hint: str = "wait for its running turn or cancel that first"
    ) -> None:
        """Name the busy id; `hint` says what to change, without a full stop."""
        self.conversation_id = conversation_id
        self.hint = hint
        super().__init__(
            f"conversation_id is {conversation_id!r}, which is busy, but a conversation runs one turn at a "
            f"time; {hint}."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.conversation_id, self.hint)


class UnknownTurnError(PensieveError):
    """An unknown turn id for this owner, or a turn whose tokens were only in memory and are gone.

    Attributes:
      turn_id: the requested id.
    """

    def __init__(self, turn_id: str) -> None:
        self.turn_id = turn_id
        super().__init__(f"turn_id is {turn_id!r}, but there is no such turn; send the whole context.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.turn_id,)


class UnknownRecordError(PensieveError):
    """A record that the history does not have for this owner.

    Attributes:
      kind: "response", "conversation" or "item".
      record_id: the requested id.
    """

    def __init__(self, kind: str, record_id: str) -> None:
        self.kind = kind
        self.record_id = record_id
        super().__init__(f"There is no {kind} {record_id!r}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.kind, self.record_id)


class ConversationChangedError(PensieveError):
    """Another request changed a conversation after it was read; nothing was stored.

    Attributes:
      conversation_id: the given id.
    """

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        super().__init__(
            f"Conversation {conversation_id!r} was changed by another request; read it again and retry."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.conversation_id,)


class TokenizerMissingError(PensieveError):
    """Text was given or asked for, but the model directory has no tokenizer."""

    def __init__(
        self,
        message: str = (
            "The model has no tokenizer, so it serves token ids only; "
            "give prompts as lists of ids, or add tokenizer.json to the model directory."
        ),
    ) -> None:
        """Build the error; the default message fits a model directory without a tokenizer."""
        super().__init__(message)


class ChatTemplateError(PensieveError):
    """A missing or broken chat template, or one that refuses these messages.

    Attributes:
      problem: what is wrong.
      hint: what to change.
      refuses_all: whether the template is missing or broken, so that other messages would not help.
    """

    def __init__(self, problem: str, hint: str = "", refuses_all: bool = False) -> None:
        """Build the message from `problem` and `hint`, both without a full stop."""
        self.problem = problem
        self.hint = hint
        self.refuses_all = refuses_all
        super().__init__(f"{problem}; {hint}." if hint else f"{problem}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.problem, self.hint, self.refuses_all)


class HistoryError(PensieveError):
    """A history store that cannot be used."""


class StorageQuotaError(PensieveError):
    """A change that would make an owner store more than the owner may; nothing was stored.

    Attributes:
      amount: "conversations", "responses" or "bytes".
      stored: the amount that the owner stores already.
      limit: the amount that the owner may store.
    """

    def __init__(self, amount: str, stored: int, limit: int) -> None:
        self.amount = amount
        self.stored = stored
        self.limit = limit
        super().__init__(
            f"stored {amount} of this key are {stored:,}; they must be at most {limit:,}. "
            "Delete responses or conversations."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.amount, self.stored, self.limit)


class HistoryUnavailableError(HistoryError):
    """The history's database cannot be reached at the moment; a later call may succeed.

    Attributes:
      may_be_kept: the connection was lost during a change, and it is unknown whether the change was stored.
    """

    def __init__(self, message: str, may_be_kept: bool = False) -> None:
        self.may_be_kept = may_be_kept
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (str(self), self.may_be_kept)


class ClockAheadError(HistoryError):
    """The clock is so far ahead of the history that a deletion by it was refused; nothing was deleted.

    Attributes:
      now_s: the time of the clock, in seconds since the epoch.
      trusted_s: the latest time that the history trusts.
    """

    def __init__(self, now_s: float, trusted_s: float) -> None:
        self.now_s = now_s
        self.trusted_s = trusted_s
        super().__init__(
            f"now_s is {now_s:.0f}; it must be at most a day after {trusted_s:.0f}, the newest time in the "
            "history. Confirm the clock, or put it right."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.now_s, self.trusted_s)


class HistoryDeniedError(HistoryError):
    """The history's database refuses this user, the password, or the operation."""


class HistoryMismatchError(HistoryError):
    """The history belongs to another model, tokenizer, version or application; it was not changed."""


class HistoryMissingError(HistoryError):
    """The history existed before and is missing or empty now; no new one was created in its place."""


class HistoryLockedError(HistoryError):
    """The history file is already open, in this process or in another."""


class HistoryBusyError(HistoryError):
    """Another program has locked the history file for writing; a later call may succeed."""


class HistoryCorruptError(HistoryError):
    """The history file was damaged and has been moved aside, or its contents contradict each other."""


class StepFailedError(PensieveError):
    """A step failed on the device: running turns are lost, but their conversations are not."""


class EngineDiedError(StepFailedError):
    """The engine's process died or stopped responding: running turns are lost, committed turns are not."""


class LogitsError(PensieveError):
    """A model computed logits that are not finite numbers, so the turn has no next token and ends.

    Other turns continue. The conversation is as before the turn, and its KV cache is computed again.

    Attributes:
      num_tokens: tokens of the reply before these logits.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(
            f"The model's logits after {num_tokens} tokens of the reply are not finite numbers, "
            "so no token can be sampled. "
            "The model's numbers may overflow in this dtype, or its weights may be damaged."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.num_tokens,)


class GrammarFailedError(PensieveError):
    """The mask of a turn could not be continued, so that the turn ended; other turns of the step are correct.

    Send the turn again with a simpler grammar.
    """


class GrammarQueueFullError(PensieveError):
    """Too many grammars are compiling; send the turn again later.

    Attributes:
      limit: number of grammars that may compile at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"{limit} grammars are compiling, which is the limit; try again in a second.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` only holds the message."""
        return type(self), (self.limit,)


class EngineClosedError(PensieveError):
    """The engine has been closed and accepts no more calls."""


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that will be stored, and of its causes.

    Their frames hold everything in use at the time, such as arrays on a device. An exception that was merely
    being handled (`__context__`) may belong to a caller: it keeps its traceback, but is no longer referenced.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one.__context__ = None
        one = one.__cause__
