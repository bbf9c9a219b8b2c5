"""Masks of what excludes ids: `allowed_token_ids`, `bad_words`, and a reply without tool calls.

Owns: the ids that a turn excludes, and after which of its ids.
Does not know: grammars, steps, or how masks reach a device (`engine.late_rows`).
Called by the submission of turns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.token_masks import WORD_BITS, bit_of, num_words
from pensieve_jax.engine.late_rows import LateRow
from pensieve_jax.text import Tokenizer

_MAX_NUM_KNOWN_TEXTS = 64


class ExcludedIds:
    """The row of a turn that may choose the ids of a fixed mask only; see `LateRow`."""

    waits = False

    def __init__(self, words: np.ndarray) -> None:
        """Allow the ids whose bits are set in `words`, i32[ceil(V / 32)]."""
        self._words = words

    def accept(self, token_id: int) -> None:
        """Change nothing, as the mask does not depend on the reply."""

    def fill(self, words: np.ndarray) -> bool:
        """Clear the bits of excluded ids."""
        words &= self._words
        return True


class BadSequences:
    """The row of a turn that may not end some sequences of several ids; see `LateRow`."""

    waits = True

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """Start a reply in which each sequence's last id is excluded behind its other ids."""
        self._sequences = tuple(sequences)
        self._max_tail = max(map(len, sequences)) - 1
        self._tail: tuple[int, ...] = ()

    def accept(self, token_id: int) -> None:
        """Continue with the next id of the reply."""
        self._tail = (*self._tail, token_id)[-self._max_tail :]

    def fill(self, words: np.ndarray) -> bool:
        """Clear the bits of ids that would end a sequence."""
        excluded = [ids[-1] for ids in self._sequences if self._tail[-len(ids) + 1 :] == ids[:-1]]
        for token_id in excluded:
            words[token_id // WORD_BITS] &= ~bit_of(token_id).view(np.int32)
        return bool(excluded)


def option_rows(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    ending_ids: Sequence[int],
    banned_ids: Sequence[int] = (),
) -> list[LateRow]:
    """Return the masks of a turn's options, and of `banned_ids`, which the reply must not have.

    Raises InvalidRequestError if an id may be missing to choose from: all of them, and `min_tokens` with
    `ending_ids`, must leave one together.
    """
    sequences: tuple[tuple[int, ...], ...] = ()
    if params.bad_words and tokenizer is not None:
        sequences = _sequences(params.bad_words, tokenizer)
    if params.allowed_token_ids is None and not sequences and not banned_ids:
        return []
    allowed = np.full(num_words(vocab_size) * WORD_BITS, params.allowed_token_ids is None)
    allowed[vocab_size:] = False
    allowed[list(params.allowed_token_ids or ())] = True
    several = [ids for ids in sequences if len(ids) > 1]
    _exclude(allowed, (*banned_ids, *(ids[0] for ids in sequences if len(ids) == 1)))
    left = allowed.copy()
    _exclude(left, (ids[-1] for ids in several))
    if params.min_tokens:
        _exclude(left, ending_ids)
    if not left.any():
        field = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
        limit = "at least one id that neither bad_words, min_tokens nor tools without calls exclude"
        raise InvalidRequestError(field, getattr(params, field), limit)
    if params.structured is not None and not allowed[list(ending_ids)].any():
        field = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
        limit = "ids with one that ends a reply, since a form of the reply has to end"
        raise InvalidRequestError(field, getattr(params, field), limit)
    rows: list[LateRow] = []
    if not allowed[:vocab_size].all():
        rows.append(ExcludedIds(np.packbits(allowed, bitorder="little").view(np.int32)))
    if several:
        rows.append(BadSequences(several))
    return rows


def _exclude(allowed: np.ndarray, token_ids: object) -> None:
    ids = np.fromiter(token_ids, np.int64)  # type: ignore[call-overload]
    allowed[ids[ids < len(allowed)]] = False


@functools.lru_cache(_MAX_NUM_KNOWN_TEXTS)
def _sequences(texts: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each text after other text, with and without a space before it."""
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        for form in (text, f" {text.lstrip()}"):
            found[tuple(tokenizer.encode_after(None, form))] = None
    found.pop((), None)
    return tuple(found)
