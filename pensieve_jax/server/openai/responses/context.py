"""The context of a response, from the fields of its request.

Owns: combining instructions, a previous response, a conversation and input to one list of messages, or to a
parent turn and the messages after it.
Does not know: sampling, streams, or what becomes of the turn. Called by `ResponsePlan` and `Responses`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypedDict

from pensieve_jax.core.errors import (
    ChatTemplateError,
    InvalidRequestError,
    UnknownRecordError,
    UnknownTurnError,
)
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.history.server_tables.changes import ConversationRow, ResponseRecord
from pensieve_jax.server.context.resolver import Memory, ResolvedContext, has_reply
from pensieve_jax.server.http.bodies import MAX_ITEMS
from pensieve_jax.server.http.errors import ApiError, invalid_value
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.response import stored_response
from pensieve_jax.server.openai.responses.schemas import (
    ContextFields,
    ItemReference,
    is_reference,
    parse_input,
)
from pensieve_jax.server.turns.checks import previous_response, template_error, unknown_previous
from pensieve_jax.server.turns.items import Item, messages_of, position_of, text_of, with_new_ids
from pensieve_jax.server.turns.template import ignores_effort
from pensieve_jax.server.workers import WorkEstimate
from pensieve_jax.text.messages import Message, num_characters
from pensieve_jax.text.reply_forms import with_form
from pensieve_jax.text.tools import Tool, num_tool_characters

MAX_READ_CHARACTERS: Final = 16 * 2**20
"""Limit of the items that one request names, in a conversation or by reference. Each item counts as JSON, and
once more for each reference to it."""
COMPACT: Final = (",", ":")  # JSON separators of stored items, for counting their characters


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """A context that is ready to be resolved.

    Attributes:
        find: resolves it; called again if the engine no longer has the parent turn.
        num_characters: approximate text length, without the path of a parent that is named.
        estimate: whether resolving it takes long, and whether it reads the history.
        new_items: the request's own items, without ids.
        conversation: the conversation to append the items to.
        tools: the tools that the template gets.
        ignored_fields: paths of unknown fields in the items, and of an effort without effect.
    """

    find: Callable[[Memory], ResolvedContext]
    num_characters: int
    estimate: WorkEstimate
    new_items: list[Item]
    conversation: ConversationRow | None
    tools: Sequence[Tool]
    ignored_fields: tuple[str, ...]


def request_context(
    services: Services,
    owner: str,
    body: ContextFields,
    *,
    durable: bool,
    token_limit: int | None = None,
    form: StructuredOutput | None = None,
) -> RequestContext:
    """Return the context of a request.

    Args:
      services: the server's services.
      owner: the key owner of the request.
      body: its fields.
      durable: whether its turn is stored.
      token_limit: maximum number of context tokens; None for no limit.
      form: the form of its reply, if it asks for one.

    Raises ApiError 400 and 404, UnknownRecordError.
    """
    template_input = with_form(body.template_input(services.chat_format), form)
    options = _Options(token_limit=token_limit, template_input=template_input)
    given, ignored = parse_input(body.input, "input") if body.input is not None else ([], ())
    conversation: ConversationRow | None = None
    past: list[Item] = []
    num_past_characters = 0
    if body.conversation_id is not None:
        conversation, past, num_past_characters = _conversation(services, owner, body.conversation_id)
    known = _KnownItems(services, owner, past)
    items = [
        known.referred(item.id, index) if isinstance(item, ItemReference) else item
        for index, item in enumerate(given)
    ]
    if conversation is not None:
        _check_growth(len(past), num_past_characters, items)
    num_tokens: int | None = 0
    find: Callable[[Memory], ResolvedContext] | None = None
    if body.previous_response_id is not None:
        turn_id, past_messages = _previous(services, owner, body, body.previous_response_id)
        messages = [*past_messages, *messages_of(items)]
        if turn_id is not None:
            find = _by_turn(services, owner, turn_id, messages, durable, body.previous_response_id, options)
            num_tokens = services.resolver.index.num_tokens(owner, turn_id)
    else:
        # A reply may be divided between the conversation and the input.
        messages = [*_instructions(body.instructions), *messages_of([*past, *items])]
        if not messages:
            raise ApiError(400, "missing_required_parameter", "input is missing.", param="input")
    if ignores_effort(services.chat_format, body.effort):
        ignored += ("reasoning.effort",)
    length = num_characters(messages) + num_tool_characters(options["template_input"].tools)
    return RequestContext(
        find=_with_call_ids(find or _by_messages(services, owner, messages, durable, options), given),
        num_characters=length,
        estimate=WorkEstimate.of(
            length, len(messages), num_tokens, asks_history=find is not None or has_reply(messages)
        ),
        new_items=items,
        conversation=conversation,
        tools=options["template_input"].tools,
        ignored_fields=ignored,
    )


def reading(services: Services, owner: str, body: ContextFields, num_bytes: int) -> WorkEstimate:
    """Return how to run `request_context` for a body of `num_bytes`.

    The size of a conversation or of referenced items is unknown before they are read, so these always count
    as long work.
    """
    items = body.input if isinstance(body.input, list) else ()
    num_tokens: int | None = 0
    if body.previous_response_id is not None:
        turn_id = body.previous_response_id.removeprefix("resp_")
        num_tokens = services.resolver.index.num_tokens(owner, turn_id)
    reads_items = body.conversation_id is not None or any(map(is_reference, items))
    return WorkEstimate.of(
        num_bytes,
        len(items),
        None if reads_items else num_tokens,
        asks_history=reads_items or body.previous_response_id is not None,
    )


def too_long(num_items: int, num_characters: int) -> str | None:
    """Return why a conversation of this size is too long for a turn, or None if it is not."""
    if num_items <= MAX_ITEMS and num_characters <= MAX_READ_CHARACTERS:
        return None
    return (
        f"{num_items} items of {num_characters} characters, but a turn reads at most "
        f"{MAX_ITEMS} of {MAX_READ_CHARACTERS}."
    )


def _check_growth(num_past: int, num_characters: int, new_items: Sequence[Item]) -> None:
    """Raise ApiError 400 if the turn would make its conversation too long for the next turn."""
    num_items = num_past + len(new_items) + 1  # the reply, whose length is unknown yet
    num_characters += len(json.dumps(with_new_ids(new_items), separators=COMPACT))
    problem = too_long(num_items, num_characters)
    if problem is not None:
        sentence = f"With this input and its reply the conversation has {problem}"
        raise invalid_value("input", f"{sentence} Send less, delete items, or start another conversation.")


def _conversation(
    services: Services, owner: str, conversation_id: str
) -> tuple[ConversationRow, list[Item], int]:
    """Return a conversation, its items, and their stored length in characters."""
    try:
        num_items, num_characters = services.history.size_of_items(owner, conversation_id)
    except UnknownRecordError as error:
        raise ApiError(404, "not_found", str(error), param="conversation") from None
    problem = too_long(num_items, num_characters)
    if problem is not None:
        raise invalid_value("conversation", f"conversation has {problem}")
    conversation, rows = services.history.all_items(owner, conversation_id)
    return conversation, [json.loads(row.item) for row in rows], num_characters


def _previous(
    services: Services, owner: str, body: ContextFields, response_id: str
) -> tuple[str | None, list[Message]]:
    """Return the id of the turn to continue from, if it is known, and the messages between it and the input.

    With the same instructions it is the response's turn. Instructions are the first message of a context and
    are not carried over. With others, the messages of the path are another context, which is resolved like
    any other. But a completion on the path has no messages: its turn stays, and the instructions follow it.
    """
    record = previous_response(services, owner, response_id)
    turn_id = record.turn_id
    assert turn_id is not None
    instructions = json.loads(record.request).get("instructions")
    if (instructions or None) == (body.instructions or None):
        return turn_id, []
    try:
        text_turn, past = services.resolver.past(owner, turn_id)
    except UnknownTurnError:
        raise unknown_previous(response_id) from None
    services.metrics.rebuilt("instructions")
    messages = [*_instructions(body.instructions), *(past[1:] if instructions else past)]
    return None if text_turn is None else text_turn.turn_id, messages


class _Options(TypedDict):
    """Arguments of the resolver."""

    token_limit: int | None
    template_input: TemplateInput


def _with_call_ids(
    find: Callable[[Memory], ResolvedContext], given: Sequence[Item | ItemReference]
) -> Callable[[Memory], ResolvedContext]:
    """Return `find` with an error that names the input item of a result without its call."""

    def find_named(memory: Memory) -> ResolvedContext:
        try:
            return find(memory)
        except InvalidRequestError as error:
            if error.field.endswith(".tool_call_id"):
                raise _without_call(given, error.value) from error
            raise

    return find_named


def _without_call(given: Sequence[Item | ItemReference], call_id: object) -> ApiError:
    """Return a 400 for the result of a call that is not in the context."""
    field = "input"
    for index, item in enumerate(given):
        if not isinstance(item, ItemReference) and item.get("call_id") == call_id:
            field = f"input[{index}].call_id"
            break
    sentence = (
        f"{field} names the call {str(call_id)[:100]!r}, which is not in the context before it. Send its "
        "function_call too, or the previous_response_id of its response."
    )
    return invalid_value(field, sentence)


def _by_turn(
    services: Services,
    owner: str,
    turn_id: str,
    messages: Sequence[Message],
    durable: bool,
    response_id: str,
    options: _Options,
) -> Callable[[Memory], ResolvedContext]:
    def find(memory: Memory) -> ResolvedContext:
        try:
            found: ResolvedContext = services.resolver.resolve_after(
                owner,
                turn_id,
                messages,
                epoch=services.engine.epoch,
                durable=durable,
                **options,
            )
        except UnknownTurnError:
            raise unknown_previous(response_id) from None
        except ChatTemplateError as error:
            raise template_error(error, (), "input") from error
        return found

    return find


def _by_messages(
    services: Services, owner: str, messages: Sequence[Message], durable: bool, options: _Options
) -> Callable[[Memory], ResolvedContext]:
    def find(memory: Memory) -> ResolvedContext:
        if memory is not Memory.ALL:
            services.metrics.rebuilt("turn_lost")
        try:
            found: ResolvedContext = services.resolver.resolve(
                owner,
                messages,
                epoch=services.engine.epoch,
                durable=durable,
                memory=memory,
                **options,
            )
        except ChatTemplateError as error:
            raise template_error(error, (), "input") from error
        return found

    return find


class _KnownItems:
    """The items that references of one request may name: items of its conversation and of responses.

    Each response is read at most once.
    """

    def __init__(self, services: Services, owner: str, past: Iterable[Item]) -> None:
        """`past` are the items of the conversation."""
        self._services = services
        self._owner = owner
        self._items = {item["id"]: item for item in past}
        self._responses: set[str] = set()
        self._num_characters = 0

    def referred(self, item_id: str, index: int) -> Item:
        """Return an item without its id; raise ApiError 404, and 400 if all named items are too long."""
        position = position_of(item_id)
        if item_id not in self._items and position is not None and position[0] not in self._responses:
            self._responses.add(position[0])
            self._read(f"resp_{position[0]}", index)
        item = self._items.get(item_id)
        if item is None:
            raise ApiError(404, "not_found", f"There is no item {item_id!r}.", param=f"input[{index}].id")
        self._count(len(text_of(item)), index)
        return {name: value for name, value in item.items() if name != "id"}

    def _read(self, response_id: str, index: int) -> None:
        try:
            record: ResponseRecord = self._services.history.response(self._owner, response_id)
        except UnknownRecordError:
            return
        self._count(len(record.input_items), index)
        record = replace(record, logprobs=None)  # they say how the reply was sampled; as input it is given
        output = stored_response(record, self._services.token_texts)["output"]
        for item in (*json.loads(record.input_items), *output):
            self._items.setdefault(item["id"], item)

    def _count(self, num_characters: int, index: int) -> None:
        self._num_characters += num_characters
        if self._num_characters > MAX_READ_CHARACTERS:
            sentence = (
                f"The items that input refers to up to here have more than {MAX_READ_CHARACTERS} characters."
            )
            raise invalid_value(f"input[{index}].id", sentence)


def _instructions(text: str | None) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []
