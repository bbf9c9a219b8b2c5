"""Sequence to sequence: torch's words, the end of a sentence by <eos>, and the limit without one."""

import numpy as np
import pytest

from model_defs.errors import UnsupportedModelError
from model_defs.recurrent import Seq2Seq
from model_defs.recurrent.errors import RequestError
from tests.models.recurrent.literal import agree, golden, lstm_shapes, random_weights, translate
from tests.models.recurrent.serving import served, small_engine
from tests.seeds import new_seed

WEIGHTS, VALUES = golden("seq2seq.npz")
GO, EOS = 1, 2
SOURCES = [VALUES[f"source_ids.{i}"].tolist() for i in range(8)]
MAX_STEPS = 20


@pytest.fixture(scope="module")
def model():
    return Seq2Seq.from_torch(WEIGHTS, go_id=GO, eos_id=EOS)


@pytest.fixture(scope="module")
def engine(model):
    with small_engine(model) as engine:
        yield engine


def test_torchs_words_up_to_the_end(model, engine):
    requests = [model.request(ids, max_extra_steps=max(MAX_STEPS - len(ids), 0)) for ids in SOURCES]
    outputs = served(engine, requests, seed=1)
    lengths = []
    for i, (ids, output) in enumerate(zip(SOURCES, outputs, strict=True)):
        expected = tuple(VALUES[f"tokens.{i}"].tolist())
        lengths.append(len(output.tokens))
        assert output.tokens[:MAX_STEPS] == expected
        assert output.tokens[-1] == EOS or len(output.tokens) == max(MAX_STEPS, len(ids))
    assert 0 < sum(length < MAX_STEPS for length in lengths) < len(lengths)


def test_a_translation_has_the_requested_number_of_words(model, engine):
    """It does not depend on the words, as in the thesis's measurements."""
    outputs = engine.run([model.request(ids, num_target_steps=9) for ids in SOURCES])
    assert any(EOS in output.tokens[:-1] for output in outputs)
    for ids, output in zip(SOURCES, outputs, strict=True):
        assert len(output.tokens) == 9
        assert agree(output.tokens, translate(WEIGHTS, ids, 9, GO))


def test_another_word_may_end_a_translation(model, engine):
    """The model would write it anyway: the word in the middle ends at its first occurrence."""
    ids = SOURCES[6]
    whole = engine.run([model.request(ids, num_target_steps=8)])[0].tokens
    ended = engine.run([model.request(ids, eos_id=whole[4], max_extra_steps=0)])[0].tokens
    assert ended == whole[: whole.index(whole[4]) + 1]


def test_a_translation_is_at_most_the_source_and_some_words_long(model, engine):
    outputs = engine.run([model.request(SOURCES[0], max_extra_steps=extra) for extra in (0, 1, 3)])
    assert [len(output.tokens) for output in outputs] == [1, 2, 4]


def test_a_translation_may_be_fifty_words_longer_by_default(model):
    """As docs/cells.md says; "input length + 50" is the limit of Vaswani et al. (2017), section 6.1."""
    assert [model.request([3] * num_words).num_steps for num_words in (1, 7)] == [51, 57]


def test_sentences_that_join_and_leave(model, engine):
    seed, steps = new_seed(), 12
    rng = np.random.default_rng(seed)
    sources = [rng.integers(0, 24, rng.integers(1, 25)) for _ in range(24)]
    outputs = served(engine, [model.request(ids, num_target_steps=steps) for ids in sources], seed)
    for ids, output in zip(sources, outputs, strict=True):
        assert agree(output.tokens, translate(WEIGHTS, ids, steps, GO))


def test_two_vocabularies():
    """They have different sizes and widths; the cells run alone."""
    shapes = lstm_shapes(30, 16, 32, "encoder.") | lstm_shapes(20, 24, 32, "decoder.")
    shapes |= {"decoder.out.weight": (20, 32), "decoder.out.bias": (20,)}
    weights = random_weights(0, shapes, 1.0)
    model = Seq2Seq.from_torch(weights, go_id=GO, eos_id=EOS)
    state = {name: np.zeros((1, *one.shape), one.dtype) for name, one in model.encoder.state.items()}
    for token in (29, 5):
        state = model.encoder((state,), np.array([token], np.int32))
    tokens = []
    for _ in range(4):
        state = model.decoder((state,))
        tokens.append(int(state["token"][0]))
    expected = translate(weights, [29, 5], 4, GO)
    assert min(margin for _, margin in expected) > 1e-3 and agree(tokens, expected)


def test_batches_of_each_cell():
    encoder, decoder = Seq2Seq.random(hidden_size=4, vocab_size=9).cells(
        encoder_max_batch=512, decoder_max_batch=256
    )
    assert (encoder.max_batch, decoder.max_batch) == (512, 256)
    assert decoder.priority > encoder.priority


def test_invalid_requests_are_refused(model):
    for kwargs, message in (
        ({"num_target_steps": 0}, "num_target_steps is 0, but must be an int of at least 1"),
        ({"max_extra_steps": -1}, "max_extra_steps is -1, but must be an int of at least 0"),
        ({"eos_id": 24}, "eos_id is 24, but must be an id from 0 to 23"),
    ):
        with pytest.raises(RequestError, match=message):
            model.request([3], **kwargs)
    with pytest.raises(UnsupportedModelError, match="eos_id=24 must be below target_vocab_size=24"):
        Seq2Seq.from_torch(WEIGHTS, go_id=GO, eos_id=24)
