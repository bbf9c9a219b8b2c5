"""A turn to submit, and the limits that a model sets for it.

Owns: the fields of a turn, the limits of a model and a configuration, and the checks that need only these.
`SamplingParams` checks what needs no limits.
Does not know: conversations, engines, or how a turn runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pensieve_jax.core.errors import InvalidRequestError, TokenizerMissingError
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.text import Message, Tokenizer


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """A turn to submit.

    Attributes:
      prompt_token_ids: tokens of the NEW turn only.
      params: sampling parameters.
      conversation_id: None for a one-off request.
      messages: the chat messages that the prompt was rendered from, stored with the turn.
      prefix: the beginning of the conversation, before the prompt; on a first turn only.
      node: the turn's position in the tree of turns, given by callers that place turns themselves, without
        a `conversation_id`. None: after the last turn of its conversation.
      keep: number of leading tokens of the earlier turns that stay in this turn's context; the prompt
        replaces the others. None keeps all.
      template_input: what the prompt was rendered from beside the messages, stored with the turn.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    conversation_id: str | None = None
    messages: tuple[Message, ...] | None = None
    prefix: SharedPrefix | None = None
    node: TurnNode | None = None
    keep: int | None = None
    template_input: TemplateInput = NO_INPUT

    @property
    def is_durable(self) -> bool:
        """Whether the turn is to be stored in the history."""
        return self.conversation_id is not None if self.node is None else self.node.durable

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prefix and the prompt."""
        return len(self.prompt_token_ids) + (0 if self.prefix is None else len(self.prefix.token_ids))


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that a model and a configuration set for a turn.

    Attributes:
      vocab_size: upper bound of token ids, exclusive.
      max_context_tokens: maximum of history + prompt + reply.
      eos_token_ids: end-of-sequence ids of the model.
      max_logprobs, max_banned_ids, penalties: see `RunnerConfig`.
      adjusts: whether the engine changes logits before the choice (`SamplingField.adjusts`).
    """

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 20
    max_banned_ids: int = 8
    penalties: bool = True
    adjusts: bool = True


def check_params(
    params: SamplingParams, limits: ModelLimits, tokenizer: Tokenizer | None, group: str = "runner."
) -> None:
    """Raise InvalidRequestError or TokenizerMissingError for parameters that this model cannot serve.

    `group` is the prefix of the settings named in hints.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("sampling_params", params, "SamplingParams")
    if params.stop and tokenizer is None:
        raise TokenizerMissingError(
            "stop strings need text, but the model has no tokenizer; use stop_token_ids."
        )
    if params.structured is not None and tokenizer is None:
        raise TokenizerMissingError("structured output needs text, but the model has no tokenizer.")
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is not None and number > limits.max_logprobs:
            limit = f"at most {limits.max_logprobs}"
            raise InvalidRequestError(name, number, limit, f"raise {group}max_logprobs")
    for name in ("stop_token_ids", "allowed_token_ids"):
        for i, token_id in enumerate(getattr(params, name) or ()):
            if token_id >= limits.vocab_size:
                raise InvalidRequestError(f"{name}[{i}]", token_id, f"below {limits.vocab_size}")
    for token_id in params.logit_bias:
        if token_id >= limits.vocab_size:
            raise InvalidRequestError("logit_bias", token_id, f"a mapping of ids below {limits.vocab_size}")
    if not limits.adjusts:
        params.check_in_use(lambda row: row.adjusts, "padded batches do not adjust logits", "")
    if not limits.penalties:
        params.check_in_use(
            lambda row: row.penalty is not None, "this engine counts no ids", f"set {group}penalties"
        )
    if params.bad_words and tokenizer is None:
        raise TokenizerMissingError(
            "bad_words need a tokenizer, which the model does not have; use allowed_token_ids or logit_bias."
        )
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


def check_token_ids(field: str, token_ids: Any, vocab_size: int) -> None:
    """Raise InvalidRequestError unless there is at least one token and all are in the vocabulary."""
    is_array = isinstance(token_ids, np.ndarray) and token_ids.ndim > 0
    if not is_array and not isinstance(token_ids, Sequence):
        raise InvalidRequestError(field, token_ids, "a list of token ids")
    if len(token_ids) == 0:
        raise InvalidRequestError(field, token_ids, "at least one token")
    # Fast path: usually all ids are valid, and there may be a million of them.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for position, token_id in enumerate(token_ids):
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            limit = f"an integer from 0 to {vocab_size - 1}, the model's vocabulary"
            raise InvalidRequestError(f"{field}[{position}]", token_id, limit)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
