"""Request checks that several handlers share.

Owns: the checks of the model name, the metadata and the context length; the lookup of a previous response and
its errors. It also chooses the field that an error names if the chat template rejects messages, and updates
the index and the metrics after a turn succeeds.
Does not know: request schemas. Called by the handlers of `server.openai` and by `server.operations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pensieve_jax.core.errors import ChatTemplateError, UnknownRecordError
from pensieve_jax.core.outputs import Output
from pensieve_jax.history.server_tables.changes import ResponseRecord
from pensieve_jax.server.context.resolver import ResolvedContext
from pensieve_jax.server.http.errors import ApiError, as_api_error, context_too_long, invalid_value
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.workers import WorkEstimate, run_cpu
from pensieve_jax.text.messages import Message

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_ROLES_OF_ALL = ("system", "user", "assistant")  # nearly every chat template accepts these


def check_model(services: Services, model: str | None) -> None:
    """Raise ApiError 404 unless `model` is the served model; None means the served model."""
    if model is not None and model != services.model_name:
        sentence = f"The model {model!r} does not exist; this server serves {services.model_name!r}."
        raise ApiError(404, "model_not_found", sentence, param="model")


def unknown_previous(response_id: str) -> ApiError:
    """Return a 404 whose text is the same for an unknown, a deleted, and another key's response."""
    sentence = f"There is no response {response_id!r} to continue from."
    return ApiError(404, "previous_response_not_found", sentence, param="previous_response_id")


def previous_response(
    services: Services, owner: str, response_id: str, *, named: str | None = None
) -> ResponseRecord:
    """Return a stored response whose reply the next turn can follow.

    Args:
      services: the server's services.
      owner: the key owner that the response belongs to.
      response_id: the response id in the history.
      named: the id that the client sent, if it differs; errors show this one.

    Raises ApiError 404 if it is unknown, 409 if it has not ended, and 400 if it has no reply.
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
        sentence = f"Response {named!r} has no reply to continue from: it is {record.status}."
        raise invalid_value("previous_response_id", sentence)
    return record


def template_error(
    error: ChatTemplateError, messages: Sequence[Message], field: str, paths: Sequence[str] | None = None
) -> ApiError:
    """Return a 400 for messages that the chat template rejects.

    `param` is `field`, or the first role in it that few templates accept. `paths` are the messages' own paths
    in the request, unless they are `field[0]` and so on.
    """
    message = as_api_error(error).message
    for index, one in enumerate(messages):
        if one["role"] not in _ROLES_OF_ALL:
            return invalid_value(f"{field}[{index}].role" if paths is None else paths[index], message)
    return invalid_value(field, message)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise ApiError 400 for metadata over the limits."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        sentence = f"metadata has {len(metadata)} pairs, but must have at most {MAX_METADATA}."
        raise invalid_value("metadata", sentence)
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            sentence = (
                f"A key of metadata has {len(key)} characters, but must have at most {MAX_METADATA_KEY}."
            )
            raise invalid_value("metadata", sentence)
        if len(value) > MAX_METADATA_VALUE:
            sentence = (
                f"metadata.{key} has {len(value)} characters, but must have at most {MAX_METADATA_VALUE}."
            )
            raise invalid_value(f"metadata.{key}", sentence)


def context_token_limit(services: Services) -> int:
    """Return the longest context, in tokens, that leaves room for a reply of one token."""
    return services.engine.info.limits.max_context_tokens - 1


def check_num_tokens(services: Services, num_tokens: int, param: str) -> None:
    """Raise ApiError 400 for a context that the engine would refuse, before it is sent to the engine."""
    token_limit = context_token_limit(services)
    if num_tokens > token_limit:
        raise context_too_long(num_tokens, token_limit, param)


async def commit_context(services: Services, context: ResolvedContext, output: Output) -> None:
    """Add the finished turn to the index, so that later contexts continue from it, and count its match.

    A long reply is read for calls and reasoning in a thread. It is not charged: the turn has ended.
    """
    await run_cpu(context.node.owner, WorkEstimate(len(output.text)).is_long, context.commit, output)
    services.metrics.matched(context.match_kind(output))
    services.metrics.context(context.keep, context.missed_tokens)
    if context.missed_tokens:
        services.metrics.rebuilt("unknown_reply")
