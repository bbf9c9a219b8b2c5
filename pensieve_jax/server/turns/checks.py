"""What several handlers ask of a request.

Owns: the checks of a model's name and of a context's length; a previous response, and the words for one that
is not there; which field names messages that cannot be written; what is done once a turn of a context has
ended well.
Does not know: schemas.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.core.errors import ChatTemplateError, UnknownRecordError
from pensieve_jax.core.outputs import Output
from pensieve_jax.history.server_tables.changes import ResponseRecord
from pensieve_jax.server.context.resolver import ResolvedContext
from pensieve_jax.server.http.errors import ApiError, as_api_error, context_too_long, invalid_value
from pensieve_jax.server.http.services import Services
from pensieve_jax.text.messages import Message

_ROLES_OF_ALL = ("system", "user", "assistant")  # what nearly every template writes


def check_model(services: Services, model: str | None) -> None:
    """Raise ApiError 404 for a model that is not the one that is served; None is that one."""
    if model is not None and model != services.model_name:
        sentence = f"There is no model {model!r} here, but {services.model_name!r}."
        raise ApiError(404, "model_not_found", sentence, param="model")


def unknown_previous(response_id: str) -> ApiError:
    """404, in the same words for what never was, is gone, or is another key's."""
    sentence = f"There is no response {response_id!r} to go on from."
    return ApiError(404, "previous_response_not_found", sentence, param="previous_response_id")


def previous_response(
    services: Services, owner: str, response_id: str, *, named: str | None = None
) -> ResponseRecord:
    """A stored response with a reply to go on from.

    Args:
      services: of the server.
      owner: whose response it is.
      response_id: of the response.
      named: how the client called it, if otherwise.

    Raises ApiError 404, 409 where it has not ended, and 400 where it has no reply.
    """
    named = named or response_id
    if services.history is None:
        raise unknown_previous(named)
    try:
        record: ResponseRecord = services.history.response(owner, response_id)
    except UnknownRecordError:
        raise unknown_previous(named) from None
    if record.status == "queued":
        sentence = f"Response {named!r} has not ended yet; wait for it."
        headers = {"retry-after": "1"}
        raise ApiError(409, "response_in_progress", sentence, param="previous_response_id", headers=headers)
    if record.turn_id is None:
        sentence = f"Response {named!r} has no reply to go on from: it is {record.status}."
        raise invalid_value("previous_response_id", sentence)
    return record


def unwritable(error: ChatTemplateError, messages: Sequence[Message], field: str) -> ApiError:
    """400 for messages that the model's template refuses: `field` has them, and one role may stand out."""
    message = as_api_error(error).message
    for index, one in enumerate(messages):
        if one["role"] not in _ROLES_OF_ALL:
            return invalid_value(f"{field}[{index}].role", message)
    return invalid_value(field, message)


def most_tokens(services: Services) -> int:
    """Of a context that leaves room for one token of a reply."""
    return services.engine.info.limits.max_context_tokens - 1


def check_num_tokens(services: Services, num_tokens: int, param: str) -> None:
    """Raise ApiError 400 for a context that the engine would refuse, before it is sent all of it."""
    most = most_tokens(services)
    if num_tokens > most:
        raise context_too_long(num_tokens, most, param)


def commit_context(services: Services, context: ResolvedContext, output: Output) -> None:
    """From now on contexts go on from this turn; and what was found for it is counted."""
    context.commit(output)
    services.metrics.matched(context.match_kind(output))
    services.metrics.context(context.found_tokens, context.missed_tokens)
    if context.missed_tokens:
        services.metrics.rebuilt("unknown_reply")
