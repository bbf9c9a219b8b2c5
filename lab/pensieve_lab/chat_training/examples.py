"""Conversations as weighted token ids, packed into rows.

Owns: the token ids of a conversation, exactly as the engine sends them; the weight of each in the loss; and
how conversations share a row.
Does not know: the model, the loss, or where conversations come from.
Called by `corpus`, `feed` and `evaluation`.

A turn's ids are those that `ChatFormat` makes for `LLM.chat`. The ids around a message are computed once,
because a message's own ids depend on nothing outside its markers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.text import ChatFormat, Message, Tokenizer
from pensieve_lab.chat_training.data import Conversation, Exchange

_MAX_EXCHANGES = 2**18  # cache size; exchanges of recorded dialogues are reused many times
_MAX_TEXTS = 2**16  # cache size; questions and acknowledgements are reused as well


class Example(NamedTuple):
    """A conversation; `weights[i]` is the loss weight of predicting token i."""

    token_ids: np.ndarray  # i32[n]
    weights: np.ndarray  # f32[n]


class Batch[Array](NamedTuple):
    """Rows of packed conversations; [B, L] each. A pytree of arrays.

    `segments` numbers the conversations of a row from 1; 0 is padding. `positions` restart at 0 with each
    conversation.
    """

    token_ids: Array  # i32
    targets: Array  # i32: the next token of each
    weights: Array  # f32: loss weight of the target; 0 where a conversation ends
    positions: Array  # i32
    segments: Array  # i32


class ConversationEncoder:
    """Encoder of conversations in one tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, *, user_weight: float) -> None:
        """Set the loss weight `user_weight` of prompt tokens; reply tokens have weight 1.

        Raises ChatTemplateError or TokenizerMissingError.
        """
        assert tokenizer.eos_id is not None
        self._tokenizer, self._user_weight = tokenizer, user_weight
        self._format = ChatFormat(tokenizer)
        [self._mark] = self._encode_text(".")
        first, *_ = self._behind_reply([_message("user")])
        self._end_id = first if first in tokenizer.special_ids else tokenizer.eos_id
        self._frame = functools.cache(self._make_frame)
        self._later_exchange = functools.lru_cache(_MAX_EXCHANGES)(self._encode_exchange)
        self._text_ids = functools.lru_cache(_MAX_TEXTS)(self._encode_text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the caches."""
        return functools.partial(type(self), user_weight=self._user_weight), (self._tokenizer,)

    def encode(self, conversation: Conversation, reply_weights: Sequence[float]) -> Example:
        """Return the whole conversation as an example; `reply_weights` scales the weight of each exchange."""
        first, *later = conversation.exchanges
        parts = [self._encode_exchange(first, is_first=True, system=conversation.system)]
        parts += [self._later_exchange(exchange) for exchange in later]
        each = [(self._user_weight * weight, weight) for weight in reply_weights]
        num_each = [(num_prompt, len(ids) - num_prompt) for ids, num_prompt in parts]
        weights = np.repeat(np.ravel(each), np.ravel(num_each)).astype(np.float32)
        return Example(np.concatenate([ids for ids, _ in parts]), weights)

    def turn_ids(self, user: str, *, is_first: bool, system: str | None = None) -> list[int]:
        """Return the prompt ids of a turn, up to where the reply begins."""
        before, behind = self._frame(is_first, system)
        return [*before, *self._text_ids(user), *behind]

    def _encode_exchange(
        self, exchange: Exchange, *, is_first: bool = False, system: str | None = None
    ) -> tuple[np.ndarray, int]:
        """Return the ids of an exchange, and the number of prompt ids among them."""
        prompt = self.turn_ids(exchange.user, is_first=is_first, system=system)
        reply = [*self._text_ids(exchange.reply), self._end_id]
        return np.array(prompt + reply, np.int32), len(prompt)

    def _make_frame(self, is_first: bool, system: str | None) -> tuple[list[int], list[int]]:
        """Return the ids that the template writes before and after a user's message."""
        messages = [_message("user")]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        if is_first:
            token_ids = self._format.token_ids(messages)
        else:
            token_ids = self._behind_reply(messages)
            if token_ids[0] == self._end_id:
                del token_ids[0]
        end = len(token_ids) - token_ids[::-1].index(self._mark)
        return token_ids[: end - 1], token_ids[end:]

    def _behind_reply(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that the template writes for messages after a reply, with the end of the reply."""
        prompt = self._format.token_ids([_message("user")])
        token_ids = self._format.token_ids([_message("user"), _message("assistant"), *messages])
        pairs = enumerate(zip(prompt, token_ids, strict=False))
        num_same = next((i for i, (one, other) in pairs if one != other), len(prompt))
        return token_ids[token_ids.index(self._mark, num_same) + 1 :]

    def _encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False)


def _message(role: str) -> Message:
    return {"role": role, "content": "."}


class Rows:
    """A batch that is being filled."""

    def __init__(self, num_rows: int, row_len: int) -> None:
        """Start with empty rows, which are all padding."""
        shape = num_rows, row_len
        self._batch = Batch(
            *(np.zeros(shape, np.float32 if name == "weights" else np.int32) for name in Batch._fields)
        )
        self._filled = np.zeros(num_rows, np.int64)
        self._num_segments = np.zeros(num_rows, np.int64)

    def add(self, example: Example) -> bool:
        """Put a conversation into the first row with room; return False if no row has room.

        A conversation longer than a row is truncated.
        """
        row_len = self._batch.token_ids.shape[1]
        ids, weights = (part[:row_len] for part in example)
        row = int(np.argmax(self._filled + len(ids) <= row_len))
        start, end = int(self._filled[row]), int(self._filled[row]) + len(ids)
        if end > row_len:
            return False
        self._filled[row] = end
        self._num_segments[row] += 1
        self._batch.token_ids[row, start:end] = ids
        self._batch.targets[row, start : end - 1] = ids[1:]  # the last token has no target
        self._batch.weights[row, start : end - 1] = weights[1:]
        self._batch.positions[row, start:end] = np.arange(len(ids))
        self._batch.segments[row, start:end] = self._num_segments[row]
        return True

    def batch(self) -> Batch[np.ndarray]:
        """Return the filled batch; `add` must not be called afterwards."""
        return self._batch


def all_batches(examples: Iterable[Example], *, num_rows: int, row_len: int) -> Iterator[Batch[np.ndarray]]:
    """Yield batches that contain every example once; the last batch may have empty rows."""
    rows, is_empty = Rows(num_rows, row_len), True
    for example in examples:
        if not rows.add(example):
            yield rows.batch()
            rows = Rows(num_rows, row_len)
            rows.add(example)
        is_empty = False
    if not is_empty:
        yield rows.batch()
