"""Conversations as token ids with a weight each, and those packed into rows.

Owns: which tokens a conversation is, in the very form in which the engine sends it; how much each counts in
the loss; how conversations share a row, and which go into the batch of a step.
Does not know: the model, the loss, or where conversations come from.
Called by: `train_chat_model`, `chat_training_evaluation` and `chat_training_step` (the form of a batch).

A turn's ids come from `ChatFormat`, turn by turn, as `LLM.chat` asks for them. What the template adds behind
a reply that ended by its end marker is the same whatever came before, so a turn is asked for behind one fixed
short turn, and remembered: the same talk stands in many conversations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from common.chat_training_data import Conversation
from pensieve_jax.text import ChatFormat, EarlierTurn, Tokenizer

_MAX_OPEN_ROWS: Final = 32  # more would fill rows better by less than a percent


class Example(NamedTuple):
    """A conversation; `weights[i]` is what predicting token i counts."""

    token_ids: np.ndarray  # i32[n]
    weights: np.ndarray  # f32[n]


class Batch[Array](NamedTuple):
    """Rows of packed conversations; [B, L] each. A pytree of arrays.

    `segments` numbers the conversations of a row from 1; 0 is padding. `positions` start over with each.
    """

    token_ids: Array  # i32
    targets: Array  # i32: the token behind each
    weights: Array  # f32: what predicting the target counts; 0 where a conversation ends
    positions: Array  # i32
    segments: Array  # i32


class ConversationEncoder:
    """Ids of conversations in one tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, *, user_weight: float) -> None:
        """`user_weight` is what a token counts that the model is sent, where one that it says counts 1.

        Raises ChatTemplateError or TokenizerMissingError.
        """
        assert tokenizer.eos_id is not None
        self._tokenizer, self._end_id, self._user_weight = tokenizer, tokenizer.eos_id, user_weight
        self._format = ChatFormat(tokenizer)
        first = self._format.turn_token_ids([], [{"role": "user", "content": "."}])
        self._assistant_id = first[-1]  # what a reply is encoded behind
        ids = (*tokenizer.encode_after(self._assistant_id, "."), self._end_id)
        self._before = EarlierTurn(({"role": "user", "content": "."},), ".", ids, "stop")
        self.turn_ids = functools.cache(self._turn_ids)
        self.reply_ids = functools.cache(self._reply_ids)

    def encode(self, conversation: Conversation, reply_weights: Sequence[float]) -> Example:
        """The whole conversation; `reply_weights` scales what each exchange counts."""
        token_ids: list[int] = []
        weights: list[float] = []
        for index, (exchange, weight) in enumerate(zip(conversation.exchanges, reply_weights, strict=True)):
            prompt = self.turn_ids(
                exchange.user, is_first=index == 0, system=conversation.system if index == 0 else None
            )
            reply = self.reply_ids(exchange.reply)
            token_ids += [*prompt, *reply]
            weights += [self._user_weight * weight] * len(prompt) + [weight] * len(reply)
        return Example(np.array(token_ids, np.int32), np.array(weights, np.float32))

    def _turn_ids(self, user: str, *, is_first: bool, system: str | None = None) -> tuple[int, ...]:
        """The prompt of a turn, up to where the reply begins."""
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return tuple(self._format.turn_token_ids([] if is_first else [self._before], messages))

    def _reply_ids(self, text: str) -> tuple[int, ...]:
        """A reply and its end marker."""
        return (*self._tokenizer.encode_after(self._assistant_id, text), self._end_id)


def batches(
    examples: Sequence[Example], *, num_rows: int, row_len: int, seed: int, start_step: int
) -> Iterator[Batch[np.ndarray]]:
    """Batches without end, from that of `start_step` on: a function of the seed and the step alone.

    Every epoch has its own order; a batch may hold the end of one and the beginning of the next.
    """
    rows = _endless_rows(examples, row_len, seed)
    for plans in itertools.batched(itertools.islice(rows, start_step * num_rows, None), num_rows):
        yield make_batch(examples, plans, num_rows, row_len)


def all_batches(examples: Sequence[Example], *, num_rows: int, row_len: int) -> Iterator[Batch[np.ndarray]]:
    """Every example once; the last batch has empty rows."""
    plans = _packed(range(len(examples)), _lengths(examples, row_len), row_len)
    for some in itertools.batched(plans, num_rows):
        yield make_batch(examples, some, num_rows, row_len)


def make_batch(
    examples: Sequence[Example], plans: Sequence[Sequence[int]], num_rows: int, row_len: int
) -> Batch[np.ndarray]:
    """Rows of the examples that `plans` names, each cut to a row's length."""
    shape = (num_rows, row_len)
    batch = Batch(*(np.zeros(shape, np.float32 if f == "weights" else np.int32) for f in Batch._fields))
    for row, plan in enumerate(plans):
        start = 0
        for segment, index in enumerate(plan, start=1):
            ids, weights = (part[:row_len] for part in examples[index])
            whole = slice(start, start + len(ids))
            inner = slice(start, start + len(ids) - 1)  # the last token has nothing behind it
            batch.token_ids[row, whole] = ids
            batch.targets[row, inner] = ids[1:]
            batch.weights[row, inner] = weights[1:]
            batch.positions[row, whole] = np.arange(len(ids))
            batch.segments[row, whole] = segment
            start += len(ids)
    return batch


def _endless_rows(examples: Sequence[Example], row_len: int, seed: int) -> Iterator[list[int]]:
    lengths = _lengths(examples, row_len)
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(len(examples))
        yield from _packed(order.tolist(), lengths, row_len)


def _lengths(examples: Sequence[Example], row_len: int) -> list[int]:
    return [min(len(example.token_ids), row_len) for example in examples]


def _packed(order: Sequence[int], lengths: Sequence[int], row_len: int) -> Iterator[list[int]]:
    """Rows of indices, first fit among a few that are open; the fullest is closed when there are too many."""
    open_rows: list[tuple[int, list[int]]] = []  # (room, indices)
    for index in order:
        length = lengths[index]
        for i, (room, row) in enumerate(open_rows):
            if room >= length:
                row.append(index)
                open_rows[i] = (room - length, row)
                break
        else:
            open_rows.append((row_len - length, [index]))
        if len(open_rows) > _MAX_OPEN_ROWS:
            fullest = min(range(len(open_rows)), key=lambda i: open_rows[i][0])
            yield open_rows.pop(fullest)[1]
    yield from (row for _, row in open_rows)
