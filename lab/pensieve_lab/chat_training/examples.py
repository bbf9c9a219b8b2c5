"""Conversations as token ids with a weight each, and those packed into rows.

Owns: which tokens a conversation is, in the very form in which the engine sends it; how much each counts in
the loss; how conversations share a row.
Does not know: the model, the loss, or where conversations come from.

A turn's ids are those that `ChatFormat` makes for `LLM.chat`. What it writes around a message is asked for
once: between two markers a message's own ids depend on nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.text import ChatFormat, EarlierTurn, Tokenizer
from pensieve_lab.chat_training.data import Conversation, Exchange

_MAX_EXCHANGES = 2**18  # remembered; those of recorded dialogues are used again and again
_MAX_TEXTS = 2**16  # likewise: questions and acknowledgements


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
        [self._mark] = self._encode_text(".")
        reply_ids = (self._mark, self._end_id)
        self._before = EarlierTurn(({"role": "user", "content": "."},), ".", reply_ids, "stop")
        self._frame = functools.cache(self._make_frame)
        self._later_exchange = functools.lru_cache(_MAX_EXCHANGES)(self._encode_exchange)
        self._text_ids = functools.lru_cache(_MAX_TEXTS)(self._encode_text)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: what is remembered stays here."""
        return functools.partial(type(self), user_weight=self._user_weight), (self._tokenizer,)

    def encode(self, conversation: Conversation, reply_weights: Sequence[float]) -> Example:
        """The whole conversation; `reply_weights` scales what each exchange counts."""
        first, *later = conversation.exchanges
        parts = [self._encode_exchange(first, is_first=True, system=conversation.system)]
        parts += [self._later_exchange(exchange) for exchange in later]
        each = [(self._user_weight * weight, weight) for weight in reply_weights]
        num_each = [(num_prompt, len(ids) - num_prompt) for ids, num_prompt in parts]
        weights = np.repeat(np.ravel(each), np.ravel(num_each)).astype(np.float32)
        return Example(np.concatenate([ids for ids, _ in parts]), weights)

    def turn_ids(self, user: str, *, is_first: bool, system: str | None = None) -> list[int]:
        """The prompt of a turn, up to where the reply begins."""
        before, behind = self._frame(is_first, system)
        return [*before, *self._text_ids(user), *behind]

    def _encode_exchange(
        self, exchange: Exchange, *, is_first: bool = False, system: str | None = None
    ) -> tuple[np.ndarray, int]:
        """Ids of an exchange, and how many of them are the prompt's."""
        prompt = self.turn_ids(exchange.user, is_first=is_first, system=system)
        reply = [*self._text_ids(exchange.reply), self._end_id]
        return np.array(prompt + reply, np.int32), len(prompt)

    def _make_frame(self, is_first: bool, system: str | None) -> tuple[list[int], list[int]]:
        """What the template writes before a user's message and behind it."""
        messages = [{"role": "user", "content": "."}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        token_ids = self._format.turn_token_ids([] if is_first else [self._before], messages)
        end = len(token_ids) - token_ids[::-1].index(self._mark)
        return token_ids[: end - 1], token_ids[end:]

    def _encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False)


class Rows:
    """A batch that is being filled."""

    def __init__(self, num_rows: int, row_len: int) -> None:
        """Empty rows, all of them padding."""
        shape = num_rows, row_len
        self._batch = Batch(
            *(np.zeros(shape, np.float32 if name == "weights" else np.int32) for name in Batch._fields)
        )
        self._filled = np.zeros(num_rows, np.int64)
        self._num_segments = np.zeros(num_rows, np.int64)

    def add(self, example: Example) -> bool:
        """Put a conversation into the first row with room; False if there is none.

        What is longer than a row loses its end.
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
        self._batch.targets[row, start : end - 1] = ids[1:]  # the last token has nothing behind it
        self._batch.weights[row, start : end - 1] = weights[1:]
        self._batch.positions[row, start:end] = np.arange(len(ids))
        self._batch.segments[row, start:end] = self._num_segments[row]
        return True

    def batch(self) -> Batch[np.ndarray]:
        """What was put in; add nothing after that."""
        return self._batch


def all_batches(examples: Iterable[Example], *, num_rows: int, row_len: int) -> Iterator[Batch[np.ndarray]]:
    """Every example once; the last batch may have empty rows."""
    rows, is_empty = Rows(num_rows, row_len), True
    for example in examples:
        if not rows.add(example):
            yield rows.batch()
            rows = Rows(num_rows, row_len)
            rows.add(example)
        is_empty = False
    if not is_empty:
        yield rows.batch()
