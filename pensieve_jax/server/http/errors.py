"""Error responses: their JSON shape, and the table from exceptions to statuses and codes.

Owns: the body, status, code and headers of an error; the mapping of the package's exceptions to them; which
part of an exception's message a client sees.
Does not know: where an error came from, logs, or HTTP beyond a status and headers.
Called by handlers, which raise ApiError, and by the middleware that converts exceptions.

The openai client retries 408, 409, 429 and 5xx unless `x-should-retry` says otherwise, and honours
`Retry-After`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from pensieve_jax.core.errors import (
    ChatTemplateError,
    ContextLengthError,
    ConversationBusyError,
    ConversationChangedError,
    EngineClosedError,
    EngineDiedError,
    GrammarFailedError,
    GrammarQueueFullError,
    GrammarTooComplexError,
    HistoryBusyError,
    HistoryCorruptError,
    HistoryError,
    HistoryUnavailableError,
    InvalidFieldError,
    InvalidRequestError,
    LogitsError,
    PensieveError,
    StepFailedError,
    StorageQuotaError,
    TokenizerMissingError,
    UnknownConversationError,
    UnknownRecordError,
    UnknownTurnError,
    UnsupportedGrammarError,
)

_NO_RETRY = {"x-should-retry": "false"}
_RETRY_SOON = {"retry-after": "1"}
INTERNAL_ERROR = "An unexpected error occurred; the server's log has the details under this x-request-id."

# Status, code and headers by exception class; the most specific class counts. `_as_sentence` has the texts.
_MEANINGS: Mapping[type[PensieveError], tuple[int, str, Mapping[str, str]]] = {
    ContextLengthError: (400, "context_length_exceeded", {}),
    GrammarTooComplexError: (400, "grammar_too_complex", {}),
    UnsupportedGrammarError: (400, "unsupported_parameter", {}),
    InvalidRequestError: (400, "invalid_value", {}),
    TokenizerMissingError: (400, "invalid_value", {}),
    ChatTemplateError: (400, "invalid_value", {}),
    UnknownRecordError: (404, "not_found", {}),
    UnknownConversationError: (404, "not_found", {}),
    UnknownTurnError: (404, "previous_response_not_found", {}),
    ConversationBusyError: (409, "conversation_locked", _RETRY_SOON),
    ConversationChangedError: (409, "conversation_locked", _RETRY_SOON),
    # OpenAI's code for a quota that waiting does not restore; its client would retry a 429 by itself.
    StorageQuotaError: (429, "insufficient_quota", _NO_RETRY),
    StepFailedError: (500, "step_failed", _NO_RETRY),
    LogitsError: (500, "logits_not_finite", _NO_RETRY),
    GrammarFailedError: (500, "grammar_failed", _NO_RETRY),
    GrammarQueueFullError: (503, "overloaded", _RETRY_SOON),
    HistoryUnavailableError: (503, "history_unavailable", _RETRY_SOON),
    HistoryBusyError: (503, "history_unavailable", _RETRY_SOON),
    HistoryCorruptError: (503, "history_damaged", _NO_RETRY),
    HistoryError: (500, "history_failed", _NO_RETRY),
    EngineClosedError: (503, "overloaded", _RETRY_SOON),
}


class ApiError(Exception):
    """An error response.

    Attributes:
      status: HTTP status.
      code: identifier of the error for programs.
      message: a sentence for people.
      param: the path of the invalid field, such as "messages[0].content"; None if no field is to blame.
      headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """See the class for the arguments."""
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        super().__init__(message)

    def __reduce__(self) -> Any:
        """Pickle all of it; the default keeps the message only."""
        given = partial(type(self), param=self.param, headers=self.headers)
        return given, (self.status, self.code, self.message)

    @property
    def type(self) -> str:
        """OpenAI's error type, which follows from the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object of the body."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that the client receives."""
        return {"error": self.error}


def invalid_value(param: str, message: str) -> ApiError:
    """Return a 400 for an invalid value of the field at the path `param`."""
    return ApiError(400, "invalid_value", message, param=param)


def unsupported(param: str, why: str = "", taken: Sequence[Any] = ()) -> ApiError:
    """Return a 400 for a field of OpenAI's API whose effect this server does not implement.

    `taken` are its values without effect, which are accepted; the message lists the strings among them.
    """
    reason = f": {why}" if why else ""
    words = " or ".join(f'"{value}"' for value in taken if isinstance(value, str) and value)
    instead = f"leave it out, or set it to {words}." if words else "leave it out."
    message = f"{param} is not supported by this server{reason}; {instead}"
    return ApiError(400, "unsupported_parameter", message, param=param)


def misplaced(param: str, hint: str) -> ApiError:
    """Return a 400 for a field that belongs to another route; `hint` is a sentence that helps the client."""
    message = f"{param} is not a field of this route. {hint}"
    return ApiError(400, "unsupported_parameter", message, param=param)


def context_too_long(num_tokens: int, token_limit: int, param: str | None) -> ApiError:
    """Return a 400 for a context of `num_tokens`; `token_limit` would leave room for a reply of one token."""
    return ApiError(400, "context_length_exceeded", _too_long(num_tokens, token_limit), param=param)


def not_found(kind: str, record_id: str) -> ApiError:
    """Return a 404 with the same text for an unknown, deleted or expired record and for another key's."""
    return ApiError(404, "not_found", f"There is no {kind} {record_id!r}.")


def rate_limited(message: str, retry_after_s: int) -> ApiError:
    """Return a 429 for a key that uses its whole share."""
    return ApiError(429, "rate_limit_exceeded", message, headers={"retry-after": str(retry_after_s)})


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """Return a 503 for a server that accepts no more work at the moment."""
    return ApiError(503, "overloaded", message, headers={"retry-after": str(retry_after_s)})


def history_damaged() -> ApiError:
    """Return a 503 for what needs a damaged history."""
    return as_api_error(HistoryCorruptError(""))


def internal_error() -> ApiError:
    """Return a 500 for an unexpected exception, without its message."""
    return ApiError(500, "internal_error", INTERNAL_ERROR)


def is_expected(error: BaseException) -> bool:
    """Return whether `as_api_error` maps the error to anything but an internal error."""
    return isinstance(error, (ApiError, *_MEANINGS))


def is_taken_key(error: BaseException) -> bool:
    """Return whether the history refused a change because another request has its idempotency key."""
    return isinstance(error, InvalidRequestError) and error.field.endswith("idempotency.key")


def as_api_error(error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
    """Return the error response for any exception.

    Args:
      error: any exception.
      fields: the client's names of fields by the engine's names, such as {"prompt": "messages"}.
    """
    if isinstance(error, ApiError):
        return error
    if is_taken_key(error):
        sentence = (
            "Another server has just answered a request with this key; send it again to get that response."
        )
        return ApiError(409, "idempotency_key_in_use", sentence, param="Idempotency-Key", headers=_RETRY_SOON)
    for kind in type(error).__mro__:
        if kind in _MEANINGS:
            status, code, headers = _MEANINGS[kind]
            field, message = getattr(error, "field", None), _as_sentence(error)
            if isinstance(field, str):
                renamed = _as_clients_say(field, fields or {})
                message = message.replace(field, renamed, 1)
                field = renamed
            return ApiError(status, code, message, param=field, headers=headers)
    return internal_error()


class ReplacedErrors:
    """Context manager that raises another error for each InvalidRequestError of its block.

    A generator would do the same in fewer lines, but its frames and the caught error refer to each other. The
    texts of a refused request would then stay until the garbage collector runs.
    """

    def __init__(self, as_error: Callable[[InvalidRequestError], ApiError]) -> None:
        """`as_error` returns the error to raise."""
        self._as_error = as_error

    def __enter__(self) -> None:
        """Begin the block; no value is bound."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the other error."""
        if isinstance(error, InvalidRequestError):
            raise self._as_error(error) from error


def renamed_fields(fields: Mapping[str, str]) -> ReplacedErrors:
    """Rename the fields of errors raised in the block to the client's names; see `as_api_error`."""
    return ReplacedErrors(partial(as_api_error, fields=fields))


def _as_sentence(error: BaseException) -> str:
    """Return the message without hints that only operators and Python callers can follow."""
    message = str(error)
    match error:
        case ContextLengthError(num_tokens=int(num_tokens), token_limit=int(token_limit)):
            return _too_long(num_tokens, token_limit)
        case ContextLengthError(token_limit=int(token_limit)):
            return _too_long(f"far more than {token_limit}", token_limit)
        case InvalidFieldError(hint=str(hint)) if hint:
            return message.removesuffix(f"; {hint}.") + "."
        case HistoryUnavailableError(may_be_kept=may_be_kept):  # clients must not see the history's address
            outcome = (
                "The change may have been stored: check before you send it again."
                if may_be_kept
                else "Try again."
            )
            return f"The history cannot be reached at the moment. {outcome}"
        case StorageQuotaError(amount=str(amount), stored=int(stored), limit=int(limit)):
            kinds = {"conversations": "conversations", "responses": "responses"}
            deletable = kinds.get(amount, "responses or conversations")
            return (
                f"This key stores {stored:,} {amount} of at most {limit:,}. Delete {deletable} to make room; "
                "GET /v1/pensieve/stored lists them."
            )
        case HistoryBusyError():
            return "Another program has locked the history. Nothing was stored; try again."
        case HistoryCorruptError():
            return "The history is damaged and stores nothing until an operator has restored it."
        case HistoryError():  # its message names the server's file
            return "The history could not be read or written; the server's log has the reason."
        case EngineDiedError():  # its message may name processes and hosts
            return (
                "The engine ended while it had this request. Check whether it was done before you repeat it."
            )
        case StepFailedError():  # its message quotes the device's runtime
            return "A step failed on the device, and this turn is lost. Committed turns are not."
        case ChatTemplateError():
            other_messages = "" if error.refuses_all else "change the messages, or "
            return f"{error.problem}; {other_messages}send text to /v1/completions."
        case _:
            return message


def _too_long(num_tokens: int | str, token_limit: int) -> str:
    return (
        f"The context has {num_tokens} tokens, but must have at most {token_limit}, besides its reply. "
        "Send less, start a new conversation, or continue from an earlier turn."
    )


def _as_clients_say(field: str, fields: Mapping[str, str]) -> str:
    matching = [name for name in fields if field == name or field.startswith((f"{name}[", f"{name}."))]
    longest = max(matching, key=len, default="")
    return fields[longest] + field[len(longest) :] if longest else field
