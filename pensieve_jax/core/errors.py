"""The exceptions a caller of the engine can meet, each with a sentence that says what to change.

Owns: the error classes, how the message of a bad field is worded, and what of an error may be kept.
Does not know: who raises them, or any value of the engine.

Raise an error before anything is scheduled or written, so that a bad request never harms its neighbours.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ChatTemplateError",
    "ConfigError",
    "ContextLengthError",
    "ConversationBusyError",
    "ConversationChangedError",
    "EngineClosedError",
    "EngineDiedError",
    "HistoryCorruptError",
    "HistoryDeniedError",
    "HistoryError",
    "HistoryLockedError",
    "HistoryMismatchError",
    "HistoryUnavailableError",
    "InvalidFieldError",
    "InvalidRequestError",
    "PensieveError",
    "StepFailedError",
    "TokenizerMissingError",
    "UnknownConversationError",
    "UnknownRecordError",
    "UnknownTurnError",
]


class _Short(reprlib.Repr):
    """Values as messages show them."""

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write out a number of more than 4,300 digits."""
        try:
            return super().repr_int(value, level)
        except ValueError:
            return f"a number of {value.bit_length()} bits"


_SHORT = _Short(maxstring=100)


class PensieveError(Exception):
    """Root of every error that this package raises on purpose.

    Attributes:
      outputs: where it ended one of several that were asked for in one call, what the others became, in
        order, with None for each that failed; None where nothing else was asked for.
    """

    outputs: Sequence[Any] | None = None


class InvalidFieldError(PensieveError, ValueError):
    """A field holds a value that cannot work.

    The message reads `<field> is <value>, but must be <limit>; <hint>.`, so `limit` completes "must be"
    (for example "at least 1" or "an int from 0 to 49151") and `hint`, if given, says what to change.

    Attributes:
      field: dotted or indexed name of the field, for example "messages[2].role".
      value: the offending value.
      limit: what would be accepted, in words.
    """

    def __init__(self, field: str, value: object, limit: object, hint: str = "") -> None:
        """`limit` completes the words "must be"; `hint` says what to change, without a full stop."""
        self.field = field
        self.value = value
        self.limit = limit
        self.hint = hint
        # A prompt may be a list of 100,000 ids: the message shows the ends of it only.
        ending = f"; {hint}." if hint else "."
        super().__init__(f"{field} is {_SHORT.repr(value)}, but must be {limit}{ending}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (self.field, self.value, self.limit, self.hint)


class ConfigError(InvalidFieldError):
    """A configuration value that is unknown, impossible, or in conflict with another one."""


class InvalidRequestError(InvalidFieldError):
    """A prompt, message list or sampling parameter that cannot be served."""


class ContextLengthError(InvalidRequestError):
    """History and prompt leave no room for one new token within the context or the page pool.

    Attributes:
      num_tokens: of history and prompt; None where there is more to it, or nobody counted them.
      most: what they might have.
    """

    def __init__(
        self,
        field: str,
        value: object,
        limit: object,
        hint: str = "",
        num_tokens: int | None = None,
        most: int | None = None,
    ) -> None:
        """See the class, and that of any bad field."""
        super().__init__(field, value, limit, hint)
        self.num_tokens = num_tokens
        self.most = most

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments."""
        return type(self), (self.field, self.value, self.limit, self.hint, self.num_tokens, self.most)


class UnknownConversationError(PensieveError, KeyError):
    """No conversation of this id exists.

    Attributes:
      conversation_id: the id that was asked for.
    """

    def __init__(self, conversation_id: str) -> None:
        """Name the unknown id."""
        self.conversation_id = conversation_id
        super().__init__(conversation_id)

    def __str__(self) -> str:
        """A sentence; `KeyError` alone would show the bare id."""
        return (
            f"conversation_id is {self.conversation_id!r}, but no conversation of that id exists; "
            "start it with generate, stream or chat, or pick one that conversations() lists."
        )


class ConversationBusyError(PensieveError):
    """A turn of this conversation is running already, or one call names it twice.

    Attributes:
      conversation_id: the id that was asked for.
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
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (self.conversation_id, self.hint)


class UnknownTurnError(PensieveError):
    """No turn of this id exists for this owner, or its tokens were in memory only and are gone.

    Attributes:
      turn_id: the id that was asked for.
    """

    def __init__(self, turn_id: str) -> None:
        """Name the unknown id."""
        self.turn_id = turn_id
        super().__init__(f"turn_id is {turn_id!r}, but there is no such turn; send the whole context.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (self.turn_id,)


class UnknownRecordError(PensieveError):
    """The history keeps no such thing for this owner.

    Attributes:
      kind: "response", "conversation" or "item".
      record_id: the id that was asked for.
    """

    def __init__(self, kind: str, record_id: str) -> None:
        """Name the unknown id."""
        self.kind = kind
        self.record_id = record_id
        super().__init__(f"There is no {kind} {record_id!r}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (self.kind, self.record_id)


class ConversationChangedError(PensieveError):
    """Somebody else changed a conversation since it was read; nothing was kept.

    Attributes:
      conversation_id: the id that was given.
    """

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        super().__init__(
            f"Conversation {conversation_id!r} was changed in the meantime; read it and send this once more."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
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
        """The default message fits a model directory without a tokenizer."""
        super().__init__(message)


class ChatTemplateError(PensieveError):
    """There is no chat template, or it cannot continue this conversation.

    Attributes:
      problem: what is wrong.
      hint: what to change.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        """Both without a full stop."""
        self.problem = problem
        self.hint = hint
        super().__init__(f"{problem}; {hint}." if hint else f"{problem}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (self.problem, self.hint)


class HistoryError(PensieveError):
    """The history store cannot be used."""


class HistoryUnavailableError(HistoryError):
    """The history's database cannot be reached at the moment; a later call may find it again.

    Attributes:
      may_be_kept: the connection was lost while a change was made, and nobody knows whether it was.
    """

    def __init__(self, message: str, may_be_kept: bool = False) -> None:
        """The message says which."""
        self.may_be_kept = may_be_kept
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (str(self), self.may_be_kept)


class HistoryDeniedError(HistoryError):
    """The history's database refuses this user, the password, or what was asked of it."""


class HistoryMismatchError(HistoryError):
    """The history belongs to another model, tokenizer, version or application; it is left as it is."""


class HistoryMissingError(HistoryError):
    """The history was there before, and is missing or empty now; none was made in its place."""


class HistoryLockedError(HistoryError):
    """The history file is open already, in this process or in another."""


class HistoryCorruptError(HistoryError):
    """The history file was damaged and has been set aside, or its contents contradict themselves."""


class StepFailedError(PensieveError):
    """A step failed on the device: the running turns are lost, their conversations are not."""


class EngineDiedError(StepFailedError):
    """The engine's process died or fell silent: its running turns are lost, what was committed is not."""


class EngineClosedError(PensieveError):
    """The engine has been closed and takes no more calls."""


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that will be kept, and of what caused it.

    Their frames hold all that was being worked on, such as arrays on a device. What was merely being handled
    when it was raised may be a caller's own: that is left as it is, and no longer referred to.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one.__context__ = None
        one = one.__cause__
