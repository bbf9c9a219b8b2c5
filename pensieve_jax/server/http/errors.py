"""What a client is told when something is wrong: one shape, and one table of who gets which status.

Owns: the body of an error, its status, code and headers, which of the package's errors means which, and
what of their messages a client is told.
Does not know: where an error came from, logs, or HTTP beyond a status and headers.

The openai client retries 408, 409, 429 and 5xx unless `x-should-retry` says otherwise, and honours
`Retry-After`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pensieve_jax.core.errors import (
    ChatTemplateError,
    ContextLengthError,
    ConversationBusyError,
    ConversationChangedError,
    EngineClosedError,
    HistoryError,
    HistoryUnavailableError,
    InvalidFieldError,
    InvalidRequestError,
    PensieveError,
    StepFailedError,
    TokenizerMissingError,
    UnknownConversationError,
    UnknownRecordError,
    UnknownTurnError,
)

_NO_RETRY = {"x-should-retry": "false"}
_RETRY_SOON = {"retry-after": "1"}
INTERNAL_ERROR = "Something went wrong in the server; its log says what, under this x-request-id."

# By class, the most specific that fits: status, code and headers. `_as_sentence` has the words.
_MEANINGS: Mapping[type[PensieveError], tuple[int, str, Mapping[str, str]]] = {
    ContextLengthError: (400, "context_length_exceeded", {}),
    InvalidRequestError: (400, "invalid_value", {}),
    TokenizerMissingError: (400, "invalid_value", {}),
    ChatTemplateError: (400, "invalid_value", {}),
    UnknownRecordError: (404, "not_found", {}),
    UnknownConversationError: (404, "not_found", {}),
    UnknownTurnError: (404, "previous_response_not_found", {}),
    ConversationBusyError: (409, "conversation_locked", _RETRY_SOON),
    ConversationChangedError: (409, "conversation_locked", _RETRY_SOON),
    StepFailedError: (500, "step_failed", _NO_RETRY),
    HistoryUnavailableError: (503, "history_unavailable", _RETRY_SOON),
    HistoryError: (500, "history_failed", _NO_RETRY),
    EngineClosedError: (503, "overloaded", _RETRY_SOON),
}


class ApiError(Exception):
    """An answer that says what is wrong.

    Attributes:
      status: of HTTP.
      code: what a program tells errors apart by.
      message: a sentence for people.
      param: the path of the field that is wrong, such as "messages[0].content", if it is one.
      headers: sent with it.
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
        """See the class; `type` follows from the status."""
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        super().__init__(message)

    @property
    def type(self) -> str:
        """What kind of error it is, in OpenAI's words."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def error(self) -> dict[str, Any]:
        """The object that describes it."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def body(self) -> dict[str, Any]:
        """JSON object that the client receives."""
        return {"error": self.error}


def invalid_value(param: str, message: str) -> ApiError:
    """400: a field holds what it cannot; `param` is its path."""
    return ApiError(400, "invalid_value", message, param=param)


def unsupported(param: str, why: str = "", taken: Sequence[Any] = ()) -> ApiError:
    """400: a field of OpenAI's API that would have an effect which this server does not have.

    `taken` are its values that would have none; words among them are told.
    """
    reason = f": {why}" if why else ""
    words = " or ".join(f'"{value}"' for value in taken if isinstance(value, str) and value)
    instead = f"leave it out, or make it {words}." if words else "leave it out."
    message = f"{param} is not supported by this server{reason}; {instead}"
    return ApiError(400, "unsupported_parameter", message, param=param)


def misplaced(param: str, hint: str) -> ApiError:
    """400: a field of another route, which whoever sends it would miss; `hint` is a sentence that helps."""
    message = f"{param} is not a field of this route. {hint}"
    return ApiError(400, "unsupported_parameter", message, param=param)


def context_too_long(num_tokens: int, most: int, param: str | None) -> ApiError:
    """400: a context of `num_tokens`, where `most` would leave room for one token of a reply."""
    return ApiError(400, "context_length_exceeded", _too_long(num_tokens, most), param=param)


def not_found(kind: str, record_id: str) -> ApiError:
    """404, in the same words for what never was, was deleted, has expired, or is another key's."""
    return ApiError(404, "not_found", f"There is no {kind} {record_id!r}.")


def rate_limited(message: str, retry_after_s: int) -> ApiError:
    """429: this key has enough on its hands."""
    return ApiError(429, "rate_limit_exceeded", message, headers={"retry-after": str(retry_after_s)})


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """503: the server takes nothing at the moment."""
    return ApiError(503, "overloaded", message, headers={"retry-after": str(retry_after_s)})


def internal_error() -> ApiError:
    """500 for what nobody expected; says nothing of it."""
    return ApiError(500, "internal_error", INTERNAL_ERROR)


def is_expected(error: BaseException) -> bool:
    """Whether `as_api_error` says more of it than that something went wrong."""
    return isinstance(error, (ApiError, *_MEANINGS))


def as_api_error(error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
    """What a client is told of an error.

    Args:
      error: any exception.
      fields: what the client calls fields that the engine knows by another name, such as prompt: messages.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError) and error.field.endswith("idempotency.key"):
        sentence = "Another server has just answered a request with this key; send it again for that answer."
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


@contextmanager
def renamed_fields(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors raised within name fields as the client does; see `as_api_error`."""
    try:
        yield
    except InvalidRequestError as error:
        raise as_api_error(error, fields) from error


def _as_sentence(error: BaseException) -> str:
    """The message, without hints for whoever starts the server or calls it from Python."""
    message = str(error)
    match error:
        case ContextLengthError(num_tokens=int(num_tokens), most=int(most)):
            return _too_long(num_tokens, most)
        case ContextLengthError(most=int(most)):
            return _too_long(f"far more than {most}", most)
        case InvalidFieldError(hint=str(hint)) if hint:
            return message.removesuffix(f"; {hint}.") + "."
        case HistoryUnavailableError(may_be_kept=may_be_kept):  # where it is concerns no client
            kept = "It may have been kept: look before you send it again." if may_be_kept else "Try again."
            return f"The history cannot be reached at the moment. {kept}"
        case ChatTemplateError():
            return f"{error.problem}; change the messages, or send text to /v1/completions."
        case _:
            return message


def _too_long(num_tokens: int | str, most: int) -> str:
    return (
        f"The context would have {num_tokens} tokens; this server takes {most} and a reply. Send less, start "
        "a new conversation, or go on from an earlier turn."
    )


def _as_clients_say(field: str, fields: Mapping[str, str]) -> str:
    for engines, clients in fields.items():
        if field == engines or field.startswith((f"{engines}[", f"{engines}.")):
            return clients + field[len(engines) :]
    return field
