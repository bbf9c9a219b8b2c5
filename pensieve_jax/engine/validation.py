"""What is wrong with a turn, before anything happens to it.

Owns: the checks that need the model's limits or the conversations; those that need neither are in
`SamplingParams` itself. A check changes nothing, so that a bad turn leaves every other one untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pensieve_jax.core.errors import (
    ContextLengthError,
    ConversationBusyError,
    InvalidRequestError,
    TokenizerMissingError,
)
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.engine.branches import Parent, Place
from pensieve_jax.engine.conversations import ConversationTable, check_conversation_id
from pensieve_jax.engine.reply import Reply
from pensieve_jax.engine.turn import Turn
from pensieve_jax.scheduler import Request
from pensieve_jax.text import Message, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model and a configuration allow of a turn.

    Attributes:
      vocab_size: token ids are below this.
      max_context_tokens: history + prompt + reply.
      eos_token_ids: the model's end-of-sequence ids.
      max_logprobs, max_banned_ids: see `RunnerConfig`.
    """

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 8
    max_banned_ids: int = 8


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """A turn to submit.

    Attributes:
      prompt_token_ids: the NEW turn only.
      params: how to sample.
      conversation_id: None for a one-off request.
      messages: the chat messages that the prompt was rendered from, kept with the turn.
      prefix: what the conversation begins with, before the prompt; on a first turn only.
      node: where the turn stands in the tree of turns, from whoever places turns itself, without a
        `conversation_id`; None: behind the last turn of its conversation.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    conversation_id: str | None = None
    messages: tuple[Message, ...] | None = None
    prefix: SharedPrefix | None = None
    node: TurnNode | None = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prefix and the prompt."""
        return len(self.prompt_token_ids) + (0 if self.prefix is None else len(self.prefix.token_ids))


def check_turn(turn: object, replies: Mapping[Request, Reply]) -> Turn:
    """`turn` itself; raises InvalidRequestError unless it is done, or its reply is one of these."""
    if not isinstance(turn, Turn) or not (turn.done or replies.get(turn.request) is turn.reply):
        raise InvalidRequestError("turn", turn, "a turn of this engine, as submit returned it")
    return turn


def check_turns(
    specs: Sequence[TurnSpec],
    limits: ModelLimits,
    conversations: ConversationTable,
    tokenizer: Tokenizer | None,
) -> list[Place | None]:
    """Where turns with a node stand.

    Raises InvalidRequestError, ContextLengthError, ConversationBusyError, TokenizerMissingError,
    UnknownTurnError or HistoryError.
    """
    _check_specs(specs)
    seen: set[str] = set()
    known: dict[Parent, Place] = {}
    places: list[Place | None] = []
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
        if i == 0 or spec.prompt_token_ids is not specs[i - 1].prompt_token_ids:  # many share a long one
            check_token_ids(field, spec.prompt_token_ids, limits.vocab_size)
        place = None if spec.node is None else _checked_place(spec, spec.node, seen, known, conversations)
        places.append(place)
        if spec.prefix is not None:
            check_prefix(spec.prefix, conversation_id, conversations)
            check_token_ids("prefix", spec.prefix.token_ids, limits.vocab_size)
        num_history = conversations.num_tokens(conversation_id) if place is None else len(place.token_ids)
        _check_length(field, spec, limits, num_history)
        check_params(spec.params, limits, tokenizer)
    return places


def check_token_ids(field: str, token_ids: Any, vocab_size: int) -> None:
    """Raise InvalidRequestError unless there is a token, and all are of the vocabulary."""
    is_array = isinstance(token_ids, np.ndarray) and token_ids.ndim > 0
    if not is_array and not isinstance(token_ids, Sequence):
        raise InvalidRequestError(field, token_ids, "a list of token ids")
    if len(token_ids) == 0:
        raise InvalidRequestError(field, token_ids, "at least one token")
    # Most often nothing is wrong, and there may be a million of them.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for position, token_id in enumerate(token_ids):
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            limit = f"an integer from 0 to {vocab_size - 1}, the model's vocabulary"
            raise InvalidRequestError(f"{field}[{position}]", token_id, limit)


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
        raise InvalidRequestError("prefix", prefix, "one that release_prefix was not called with", hint)
    history_len = conversations.num_tokens(conversation_id)
    if history_len:
        raise InvalidRequestError(
            "prefix",
            prefix,
            f"None: {conversation_id!r} has {history_len} tokens, and only a first turn takes a prefix",
            "leave it out: the conversation begins as its first turn did",
        )


def checked_prefix(prefix: object, limits: ModelLimits | None = None) -> SharedPrefix:
    """`prefix` itself; raises InvalidRequestError where it is none, or with `limits` has other ids."""
    if not isinstance(prefix, SharedPrefix) or not isinstance(prefix.token_ids, tuple):
        raise InvalidRequestError("prefix", prefix, "what share_prefix returned, or None")
    if limits is not None:
        check_token_ids("prefix", prefix.token_ids, limits.vocab_size)
    return prefix


def _check_specs(specs: object) -> None:
    """What everything that follows takes for granted: an AttributeError would be taken for an interrupt."""
    if not isinstance(specs, Sequence):
        raise InvalidRequestError("specs", specs, "a list of turns")
    for i, spec in enumerate(specs):
        if not isinstance(spec, TurnSpec):
            raise InvalidRequestError(f"specs[{i}]", spec, "a TurnSpec")
        if spec.messages is None:
            continue
        is_list = isinstance(spec.messages, list | tuple)
        if not is_list or not all(isinstance(one, Mapping) for one in spec.messages):
            raise InvalidRequestError(f"specs[{i}].messages", spec.messages, "None or a tuple of messages")


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _checked_place(
    spec: TurnSpec,
    node: TurnNode,
    seen: set[str],
    known: dict[Parent, Place],
    conversations: ConversationTable,
) -> Place:
    """Where a turn stands whose caller placed it; nothing else may say so."""
    if not isinstance(node, TurnNode):
        raise InvalidRequestError("node", node, "a TurnNode or None")
    for field, value in (("conversation_id", spec.conversation_id), ("prefix", spec.prefix)):
        if value is not None:
            raise InvalidRequestError(
                field, value, "None for a turn with a node, which says what it goes on from"
            )
    if node.turn_id in seen:
        raise InvalidRequestError("turn_id", node.turn_id, "named once in a call")
    seen.add(node.turn_id)
    return conversations.branches.find(node, known)


def _check_length(field: str, spec: TurnSpec, limits: ModelLimits, history_len: int) -> None:
    prompt_len = spec.num_new_tokens
    if history_len + prompt_len + 1 > limits.max_context_tokens:
        raise ContextLengthError(
            field,
            f"{prompt_len} tokens after a history of {history_len}",
            f"at most {limits.max_context_tokens - 1} tokens together with the history, to leave room for "
            f"one reply token in the context of {limits.max_context_tokens}",
            "truncate the conversation or shorten the prompt; max_context_tokens and gpu_pages can be raised "
            "as far as the model has positions",
            history_len + prompt_len,
            limits.max_context_tokens - 1,
        )


def check_params(
    params: SamplingParams, limits: ModelLimits, tokenizer: Tokenizer | None, group: str = "runner."
) -> None:
    """Raise InvalidRequestError or TokenizerMissingError for what this model cannot be asked for.

    `group` is what the settings that hints name are part of.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("sampling_params", params, "SamplingParams")
    if params.stop and tokenizer is None:
        raise TokenizerMissingError(
            "stop strings need text, but the model has no tokenizer; use stop_token_ids."
        )
    if params.logprobs is not None and params.logprobs > limits.max_logprobs:
        raise InvalidRequestError(
            "logprobs", params.logprobs, f"at most {limits.max_logprobs}", f"raise {group}max_logprobs"
        )
    for i, token_id in enumerate(params.stop_token_ids):
        if token_id >= limits.vocab_size:
            raise InvalidRequestError(f"stop_token_ids[{i}]", token_id, f"below {limits.vocab_size}")
    num_banned = len(params.ending_ids(limits.eos_token_ids)) if params.min_tokens else 0
    if num_banned > limits.max_banned_ids:
        raise InvalidRequestError(
            "stop_token_ids",
            f"{num_banned} ids with end-of-sequence",
            f"at most {limits.max_banned_ids} where min_tokens is set",
            f"raise {group}max_banned_ids",
        )
    if num_banned >= limits.vocab_size:
        raise InvalidRequestError(
            "stop_token_ids", num_banned, f"fewer than the vocabulary ({limits.vocab_size})"
        )
