"""Validation of turns before submission.

Owns: the checks that need the conversations; `decoding.turn_spec` has those that need only the model's
limits. Checks change nothing, so an invalid turn does not affect other turns.
Does not know: the scheduler or the cache.
Called by the engine, the submission of turns, `prompts` and `pensieve generate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pensieve_jax.core.errors import ContextLengthError, ConversationBusyError, InvalidRequestError
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec, check_params, check_token_ids
from pensieve_jax.engine.branches import Parent, TurnPosition
from pensieve_jax.engine.conversations import ConversationTable, check_conversation_id
from pensieve_jax.engine.turn import ReplyState, Turn
from pensieve_jax.scheduler import Request
from pensieve_jax.text import Tokenizer


def check_turn(turn: object, replies: Mapping[Request, ReplyState]) -> Turn:
    """Return `turn`; raises InvalidRequestError unless it is done or its reply is in `replies`."""
    if not isinstance(turn, Turn) or not (turn.done or replies.get(turn.request) is turn.reply):
        raise InvalidRequestError("turn", turn, "a turn of this engine, as submit returned it")
    return turn


def check_turns(
    specs: Sequence[TurnSpec],
    limits: ModelLimits,
    conversations: ConversationTable,
    tokenizer: Tokenizer | None,
) -> list[TurnPosition | None]:
    """Check all turns of a call; returns the positions of turns with a node, and None for the others.

    Raises InvalidRequestError, ContextLengthError, ConversationBusyError, TokenizerMissingError,
    UnknownTurnError or HistoryError.
    """
    _check_specs(specs)
    seen: set[str] = set()
    known: dict[Parent, TurnPosition] = {}
    places: list[TurnPosition | None] = []
    for i, spec in enumerate(specs):
        field = "conversation_id" if len(specs) == 1 else f"conversation_ids[{i}]"
        conversation_id = spec.conversation_id
        check_conversation_id(conversation_id, field)
        if conversation_id is not None:
            if conversation_id in seen:
                raise ConversationBusyError(conversation_id, "name it once in a call")
            if conversations.is_busy(conversation_id):
                raise ConversationBusyError(conversation_id)
            seen.add(conversation_id)
        field = "prompt" if len(specs) == 1 else f"prompts[{i}]"
        if i == 0 or spec.prompt_token_ids is not specs[i - 1].prompt_token_ids:  # checks a shared one once
            check_token_ids(field, spec.prompt_token_ids, limits.vocab_size)
        place = None if spec.node is None else _checked_place(spec, spec.node, seen, known, conversations)
        places.append(place)
        if spec.prefix is not None:
            check_prefix(spec.prefix, conversation_id, conversations)
            check_token_ids("prefix", spec.prefix.token_ids, limits.vocab_size)
        num_history = conversations.num_tokens(conversation_id) if place is None else len(place.token_ids)
        _check_length(field, spec, limits, _num_kept(spec, num_history))
        check_params(spec.params, limits, tokenizer)
    return places


def check_beginning(token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raise InvalidRequestError or ContextLengthError unless conversations can begin with these ids."""
    check_token_ids("prefix", token_ids, limits.vocab_size)
    if len(token_ids) + 2 > limits.max_context_tokens:
        limit = f"at most {limits.max_context_tokens - 2}, to leave room for a prompt and a reply"
        raise ContextLengthError("prefix", f"{len(token_ids)} tokens", limit)


def check_prefix(prefix: object, conversation_id: str | None, conversations: ConversationTable) -> None:
    """Raise InvalidRequestError unless a turn of this conversation may begin with `prefix`."""
    prefix = checked_prefix(prefix)
    if prefix.released:
        hint = "share it again: share_prefix returns a new one"
        raise InvalidRequestError("prefix", prefix, "a prefix that was not released", hint)
    history_len = conversations.num_tokens(conversation_id)
    if history_len:
        raise InvalidRequestError(
            "prefix",
            prefix,
            f"None: {conversation_id!r} has {history_len} tokens, and only a first turn takes a prefix",
            "leave it out: the conversation keeps the beginning of its first turn",
        )


def checked_prefix(prefix: object, limits: ModelLimits | None = None) -> SharedPrefix:
    """Return `prefix`; raises InvalidRequestError for another type, or for ids outside `limits` if given."""
    if not isinstance(prefix, SharedPrefix) or not isinstance(prefix.token_ids, tuple):
        raise InvalidRequestError("prefix", prefix, "what share_prefix returned, or None")
    if limits is not None:
        check_token_ids("prefix", prefix.token_ids, limits.vocab_size)
    return prefix


def _check_specs(specs: object) -> None:
    """Check the types that later code relies on; the engine would treat an AttributeError as an interrupt."""
    if not isinstance(specs, Sequence):
        raise InvalidRequestError("specs", specs, "a list of turns")
    for i, spec in enumerate(specs):
        if not isinstance(spec, TurnSpec):
            raise InvalidRequestError(f"specs[{i}]", spec, "a TurnSpec")
        if not isinstance(spec.template_input, TemplateInput):
            raise InvalidRequestError(f"specs[{i}].template_input", spec.template_input, "a TemplateInput")
        if spec.messages is None:
            continue
        is_list = isinstance(spec.messages, list | tuple)
        if not is_list or not all(isinstance(one, Mapping) for one in spec.messages):
            raise InvalidRequestError(f"specs[{i}].messages", spec.messages, "None or a tuple of messages")


def _checked_place(
    spec: TurnSpec,
    node: TurnNode,
    seen: set[str],
    known: dict[Parent, TurnPosition],
    conversations: ConversationTable,
) -> TurnPosition:
    """Return the position of a turn with a node, which must not have a conversation id or a prefix."""
    if not isinstance(node, TurnNode):
        raise InvalidRequestError("node", node, "a TurnNode or None")
    for field, value in (("conversation_id", spec.conversation_id), ("prefix", spec.prefix)):
        if value is not None:
            raise InvalidRequestError(
                field, value, "None for a turn with a node, which names the turn to continue from"
            )
    if node.turn_id in seen:
        raise InvalidRequestError("turn_id", node.turn_id, "named once in a call")
    seen.add(node.turn_id)
    return conversations.branches.find(node, known)


def _num_kept(spec: TurnSpec, num_history: int) -> int:
    """Return how many tokens of the history stay in the context; raises InvalidRequestError."""
    keep = spec.keep
    if keep is None:
        return num_history
    if isinstance(keep, bool) or not isinstance(keep, int) or not 0 <= keep <= num_history:
        limit = f"None or an integer from 0 to the {num_history} tokens of the earlier turns"
        raise InvalidRequestError("keep", keep, limit)
    return keep


def _check_length(field: str, spec: TurnSpec, limits: ModelLimits, history_len: int) -> None:
    prompt_len = spec.num_new_tokens
    if history_len + prompt_len + 1 > limits.max_context_tokens:
        raise ContextLengthError(
            field,
            f"{prompt_len} tokens after a history of {history_len}",
            f"at most {limits.max_context_tokens - 1} tokens together with the history, to leave room for "
            f"one reply token in the context of {limits.max_context_tokens}",
            "truncate the conversation or shorten the prompt, or raise max_context_tokens and gpu_pages "
            "up to the model's number of positions",
            history_len + prompt_len,
            limits.max_context_tokens - 1,
        )
