"""An LSTM: torch's results, in batches that sentences join and leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs.recurrent import LSTM
from model_defs.recurrent.errors import RequestError
from tests.models.recurrent.literal import golden, lstm, lstm_shapes, random_weights
from tests.models.recurrent.serving import served, small_engine
from tests.seeds import new_seed

WEIGHTS, VALUES = golden("lstm.npz")
VOCAB_SIZE, HIDDEN = 50, 64


def sentences(seed: int, num: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, rng.integers(1, 40)) for _ in range(num)]


def by_scan(model: LSTM, ids: np.ndarray) -> dict[str, jax.Array]:
    state = {name: jnp.zeros((1, *one.shape), one.dtype) for name, one in model.state.items()}
    step = lambda state, token: (model((state,), token[None]), None)  # noqa: E731
    last, _ = jax.lax.scan(step, state, jnp.asarray(ids, jnp.int32))
    return {name: value[0] for name, value in last.items()}


def test_results_equal_torchs():
    model = LSTM.from_torch(WEIGHTS)
    with small_engine(model) as engine:
        outputs = engine.run([model.request(VALUES[f"token_ids.{i}"]) for i in range(3)])
    for i, output in enumerate(outputs):
        np.testing.assert_allclose(output.states[0]["h"], VALUES[f"h.{i}"], atol=1e-5, rtol=0)
        np.testing.assert_allclose(output.states[0]["c"], VALUES[f"c.{i}"], atol=1e-5, rtol=0)


def test_the_literal_model_equals_torchs():
    for i in range(3):
        h, c = lstm(WEIGHTS, VALUES[f"token_ids.{i}"])
        np.testing.assert_allclose(h, VALUES[f"h.{i}"], atol=1e-6, rtol=0)
        np.testing.assert_allclose(c, VALUES[f"c.{i}"], atol=1e-6, rtol=0)


def test_sentences_that_join_and_leave():
    seed = new_seed()
    weights = random_weights(seed, lstm_shapes(VOCAB_SIZE, 48, HIDDEN), 0.2)
    model, words = LSTM.from_torch(weights), sentences(seed, 40)
    with small_engine(model) as engine:
        outputs = served(engine, [model.request(ids) for ids in words], seed)
        assert engine.stats()["num_compilations"] == 0
    for ids, output in zip(words, outputs, strict=True):
        h, c = lstm(weights, ids)
        np.testing.assert_allclose(output.states[0]["h"], h, atol=2e-5, rtol=0)
        np.testing.assert_allclose(output.states[0]["c"], c, atol=2e-5, rtol=0)


def test_a_sentence_by_a_scan():
    """Any JAX code may run the cell, which is a function."""
    h = by_scan(LSTM.from_torch(WEIGHTS), VALUES["token_ids.2"])["h"]
    np.testing.assert_allclose(h, VALUES["h.2"], atol=1e-5, rtol=0)


def test_bfloat16_is_near():
    weights = random_weights(0, lstm_shapes(VOCAB_SIZE, HIDDEN, HIDDEN), 0.2)
    ids = sentences(0, 1)[0]
    found = by_scan(LSTM.from_torch(weights, dtype="bfloat16"), ids)
    assert (found["h"].dtype, found["c"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(found["h"].astype(np.float32), lstm(weights, ids)[0], atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], r"token_ids is \[\], but must be at least one token id"),
        ([1.5], r"token_ids is \[1.5\], but must be at least one token id"),
        ([[1]], r"token_ids is \[\[1\]\], but must be at least one token id"),
        ([3, 50], r"token_ids\[1\] is 50, but must be an id from 0 to 49"),
        ([3, 4, -1], r"token_ids\[2\] is -1, but must be an id from 0 to 49"),
    ],
)
def test_invalid_requests_are_refused(token_ids, message):
    model = LSTM.random(hidden_size=4, vocab_size=50)
    with pytest.raises(RequestError, match=message):
        model.request(token_ids)
