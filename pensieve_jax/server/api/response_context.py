"""The context of a response: what its request names, and what it adds.

Owns: how instructions, a previous response, a conversation and input become one list of messages, or a turn
and the messages behind it.
Does not know: sampling, streams, or what becomes of the turn.
Called by: `response_plan`, and `responses` for the counting of input tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pensieve_jax.core.errors import UnknownRecordError, UnknownTurnError
from pensieve_jax.history.changes import ConversationRow, ResponseRecord
from pensieve_jax.server.api.common import previous_response, unknown_previous
from pensieve_jax.server.api.item_schemas import (
    Item,
    ItemReference,
    message_of,
    messages_of,
    parse_input,
    place_of,
)
from pensieve_jax.server.api.response_object import kept_response
from pensieve_jax.server.api.response_schemas import ContextFields
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.services import Services
from pensieve_jax.text.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """A context that can be resolved.

    Attributes:
      find: resolves it; again, when a turn that it went on from is gone.
      num_characters: about how much text it is.
      new_items: the request's own items, without ids.
      conversation: that its items are appended to.
      ignored_fields: paths of fields of its items that nobody knows.
    """

    find: Callable[[Memory], ResolvedContext]
    num_characters: int
    new_items: list[Item]
    conversation: ConversationRow | None
    ignored_fields: tuple[str, ...]


def request_context(services: Services, owner: str, body: ContextFields, *, durable: bool) -> RequestContext:
    """The context that a request's fields amount to; `durable`: its turn is to be kept.

    Raises ApiError 400 and 404, UnknownRecordError.
    """
    conversation, past = None, []
    if body.conversation_id is not None:
        conversation, rows = services.history.all_items(owner, body.conversation_id)
        past = [json.loads(row.item) for row in rows]
    given, ignored = parse_input(body.input, "input") if body.input is not None else ([], ())
    items = [_known_item(services, owner, item, past, index) for index, item in enumerate(given)]
    new_messages = messages_of(items)
    first = _instructions(body.instructions)
    find: Callable[[Memory], ResolvedContext]
    if body.previous_response_id is not None:
        find, num_past = _behind(services, owner, body, body.previous_response_id, new_messages, durable)
    else:
        whole = [*first, *messages_of(past), *new_messages]
        if not whole:
            raise ApiError(400, "missing_required_parameter", "input is missing.", param="input")
        find, num_past = _by_messages(services, owner, whole, durable), _num_characters([*first, *whole])
    return RequestContext(
        find=find,
        num_characters=num_past + _num_characters(new_messages),
        new_items=items,
        conversation=conversation,
        ignored_fields=ignored,
    )


def _behind(
    services: Services,
    owner: str,
    body: ContextFields,
    response_id: str,
    new_messages: Sequence[Message],
    durable: bool,
) -> tuple[Callable[[Memory], ResolvedContext], int]:
    """Behind a response: its turn is named where the instructions are the same.

    Instructions are the first message of a context and not carried over. Under others the messages of the
    path are another context, which is looked for like any.
    """
    record = previous_response(services, owner, response_id)
    turn_id = record.turn_id
    assert turn_id is not None
    instructions = json.loads(record.request).get("instructions")
    if (instructions or None) == (body.instructions or None):

        def find(memory: Memory) -> ResolvedContext:
            try:
                found: ResolvedContext = services.resolver.resolve_after(
                    owner, turn_id, new_messages, epoch=services.engine.epoch, durable=durable
                )
            except UnknownTurnError:
                raise unknown_previous(response_id) from None
            return found

        return find, _num_characters(new_messages)
    try:
        past = services.resolver.path_messages(owner, turn_id)
    except UnknownTurnError:
        raise unknown_previous(response_id) from None
    if instructions:
        past = past[1:]
    services.metrics.rebuilt("instructions")
    whole = [*_instructions(body.instructions), *past, *new_messages]
    return _by_messages(services, owner, whole, durable), _num_characters(whole)


def _by_messages(
    services: Services, owner: str, messages: Sequence[Message], durable: bool
) -> Callable[[Memory], ResolvedContext]:
    def find(memory: Memory) -> ResolvedContext:
        if memory is not Memory.ALL:
            services.metrics.rebuilt("turn_lost")
        found: ResolvedContext = services.resolver.resolve(
            owner, messages, epoch=services.engine.epoch, durable=durable, memory=memory
        )
        return found

    return find


def _known_item(
    services: Services, owner: str, item: Item | ItemReference, past: Sequence[Item], index: int
) -> Item:
    """The item itself, for a reference what it refers to: a response's, or the conversation's."""
    if not isinstance(item, ItemReference):
        return item
    found = next((one for one in past if one["id"] == item.id), None) or _item_of_response(
        services, owner, item.id
    )
    if found is None:
        raise ApiError(404, "not_found", f"There is no item {item.id!r}.", param=f"input[{index}].id")
    return {name: value for name, value in found.items() if name != "id"}


def _item_of_response(services: Services, owner: str, item_id: str) -> Item | None:
    place = place_of(item_id)
    if place is None:
        return None
    turn_id, number = place
    try:
        record: ResponseRecord = services.history.response(owner, f"resp_{turn_id}")
    except UnknownRecordError:
        return None
    items: list[Item] = kept_response(record)["output"] if number is None else json.loads(record.input_items)
    return next((one for one in items if one["id"] == item_id), None)


def _instructions(text: str | None) -> list[Message]:
    return [message_of({"role": "system", "content": [{"text": text}]})] if text else []


def _num_characters(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)
