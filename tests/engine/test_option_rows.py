"""Masks of sampling options against a plain search in the reply's ids."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.engine.late_rows import JoinedRows
from pensieve_jax.engine.option_rows import BadSequences, option_rows
from pensieve_jax.text import Tokenizer
from tests.seeds import new_seed
from tests.text.tokenizer_zoo import byte_level_backend, metaspace_backend

NUM_WORDS = 3


def allowed_of(row) -> set[int]:
    words = np.full(NUM_WORDS, -1, np.int32)
    row.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_the_last_id_of_a_sequence_is_excluded_behind_the_others():
    rng = np.random.default_rng(new_seed())
    for _ in range(20):
        sequences = {tuple(rng.integers(0, 4, rng.integers(2, 5)).tolist()) for _ in range(5)}
        row, reply = BadSequences(sorted(sequences)), []
        for _ in range(30):
            expected = {ids[-1] for ids in sequences if reply[-(len(ids) - 1) :] == list(ids[:-1])}
            assert allowed_of(row) == set(range(32 * NUM_WORDS)) - expected
            reply.append(int(rng.integers(0, 4)))
            row.accept(reply[-1])


def test_a_text_is_excluded_with_and_without_a_space():
    for tokenizer in (Tokenizer(byte_level_backend()), Tokenizer(metaspace_backend())):
        vocab_size = tokenizer.vocab_size
        params = SamplingParams(bad_words=["the cat"])
        row = JoinedRows(option_rows(params, tokenizer, vocab_size, ()))
        assert row.waits
        for text in ("the cat", " the cat"):
            ids = tokenizer.encode_after(None, text)
            one = JoinedRows(option_rows(params, tokenizer, vocab_size, ()))
            for token_id in ids[:-1]:
                one.accept(token_id)
            words = np.full(-(-vocab_size // 32), -1, np.int32)
            assert one.fill(words)
            assert not np.unpackbits(words.view(np.uint8), bitorder="little")[ids[-1]]


def test_options_without_masks_have_no_rows():
    assert option_rows(SamplingParams(), None, 96, ()) == []
    (row,) = option_rows(SamplingParams(allowed_token_ids=(3, 64)), None, 90, ())
    assert allowed_of(row) == {3, 64} and not row.waits


def test_a_form_needs_an_id_that_ends_the_reply():
    form = StructuredOutput.json_object()
    with pytest.raises(InvalidRequestError, match="one that ends a reply") as caught:
        option_rows(SamplingParams(allowed_token_ids=(3, 64), structured=form), None, 90, (1, 2))
    assert caught.value.field == "allowed_token_ids"
    assert option_rows(SamplingParams(allowed_token_ids=(2, 64), structured=form), None, 90, (1, 2))


def test_banned_ids_are_excluded_without_waiting_and_count_towards_no_limit():
    (row,) = option_rows(SamplingParams(), None, 90, (), (3, 64))
    assert allowed_of(row) == set(range(90)) - {3, 64} and not row.waits
    with pytest.raises(InvalidRequestError, match="tools without calls") as caught:
        option_rows(SamplingParams(allowed_token_ids=(3,)), None, 90, (), (3,))
    assert caught.value.field == "allowed_token_ids"
