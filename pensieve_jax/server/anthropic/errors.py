"""Errors in the form of Anthropic's API.

Owns: the body, type and status of an error there.
Does not know: what an error means; `http.errors` maps exceptions to codes. Called by the routes and by the
middleware, for requests that reach no handler of these routes.

The anthropic client chooses the class of its exception by the status, retries as the openai client does, and
shows `details.error_code`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.replies import BytesResponse, json_reply

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_OVERLOADED_STATUS: Final = 529
_NO_THREADS: Final = "thread_unsupported_request"
"""Code of an error about `thread`, after which the anthropic client sends all messages itself."""
_TOO_LONG: Final = "prompt is too long"
"""How messages about a full context begin: Claude Code searches for these words, and then compacts."""


def error_reply(error: ApiError, request_id: str) -> BytesResponse:
    """Return the response of an error."""
    return json_reply(error_body(error, request_id), _status(error), error.headers)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the JSON object of an error, which an event of a stream has, too."""
    status = _status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"{_TOO_LONG}: {message}"
    is_thread = error.code == "unsupported_parameter" and error.param == "thread"
    details = {"error_code": _NO_THREADS if is_thread else error.code, "param": error.param}
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "details": details},
        "request_id": request_id,
    }


def _status(error: ApiError) -> int:
    return _OVERLOADED_STATUS if error.code == "overloaded" else error.status
