"""Mamba: transformers' tokens, each request as if it were alone, and the ends of replies."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from model_defs import CheckpointError, UnsupportedModelError
from model_defs.recurrent import Mamba
from model_defs.recurrent.errors import RequestError
from model_defs.recurrent.mamba_config import MambaConfig, parse_mamba
from model_defs.recurrent.tensors import open_tensors
from tests.models.recurrent import literal
from tests.models.recurrent.literal import GOLDEN, agree
from tests.models.recurrent.serving import served, small_engine
from tests.seeds import new_seed

DIRECTORY = GOLDEN / "mamba"
CONFIG = json.loads((DIRECTORY / "config.json").read_text())
WEIGHTS = {name: np.asarray(one.read(), np.float32) for name, one in open_tensors(DIRECTORY).items()}
_, VALUES = literal.golden("mamba/outputs.npz")
PROMPTS = [VALUES[f"prompt.{i}"].tolist() for i in range(4)]
EXPECTED = [tuple(VALUES[f"tokens.{i}"].tolist()) for i in range(4)]


@pytest.fixture(scope="module")
def model():
    return Mamba.from_hf(DIRECTORY)


@pytest.fixture(scope="module")
def engine(model):
    with small_engine(model) as engine:
        yield engine


def replies(model, engine, prompts, seed=0, **options):
    requests = [model.request(ids, **{"max_new_tokens": 12, "ignore_eos": True} | options) for ids in prompts]
    outputs = served(engine, requests, seed)
    return [request.reply(output) for request, output in zip(requests, outputs, strict=True)]


def test_the_literal_model_equals_transformers():
    for i, prompt in enumerate(PROMPTS):
        text = literal.Mamba(WEIGHTS, CONFIG)
        scores = [text.step(token) for token in [*prompt, *EXPECTED[i][:-1]]]
        np.testing.assert_allclose(scores, VALUES[f"logits.{i}"], atol=1e-4, rtol=0)


def test_tokens_equal_those_of_transformers(model, engine):
    assert replies(model, engine, PROMPTS) == EXPECTED


def test_states_equal_those_of_transformers(model):
    """They are compared after a prompt, in a batch with another text."""
    text = literal.Mamba(WEIGHTS, CONFIG)
    state = {name: np.zeros((2, *one.shape), one.dtype) for name, one in model.state.items()}
    step = jax.jit(lambda state, token: model((state,), token))
    for token in PROMPTS[3]:
        text.step(token)
        state = step(state, np.array([token, 5], np.int32))
    for i in range(CONFIG["num_hidden_layers"]):
        np.testing.assert_allclose(state["state"][0, i], text.states[i].T, atol=2e-5, rtol=0)
        np.testing.assert_allclose(state["window"][0, i], text.windows[i][:, 1:].T, atol=2e-5, rtol=0)


def test_requests_of_different_lengths_run_as_if_alone(model, engine):
    seed = new_seed()
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 64, length).tolist() for length in (1, 2, 3, 5, 8, 13, 21, 34)]
    num_compilations = engine.stats()["num_compilations"]
    found = replies(model, engine, prompts, seed, max_new_tokens=16)
    assert engine.stats()["num_compilations"] == num_compilations
    for prompt, reply in zip(prompts, found, strict=True):
        assert agree(reply, literal.Mamba(WEIGHTS, CONFIG).continued(prompt, 16))


def test_an_ending_id_ends_a_reply(model, engine):
    """It does not count in the prompt, nor if it is ignored; it is part of the reply."""
    eos = EXPECTED[3][4]
    ended = EXPECTED[3][: EXPECTED[3].index(eos) + 1]
    assert replies(model, engine, [PROMPTS[3]], ignore_eos=False, eos_id=eos) == [ended]
    assert replies(model, engine, [PROMPTS[3]], ignore_eos=False, eos_id=EXPECTED[3][0]) == [EXPECTED[3][:1]]
    assert 3 in PROMPTS[3] and model.config.eos_token_id == 3
    assert replies(model, engine, [PROMPTS[3]], ignore_eos=False) == [EXPECTED[3]]
    assert replies(model, engine, PROMPTS[:2], max_new_tokens=1) == [EXPECTED[0][:1], EXPECTED[1][:1]]


def test_biases_and_an_untied_head():
    """Runs the cell alone, token by token."""
    config = CONFIG | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}
    rng = np.random.default_rng(0)
    weights = {name: one for name, one in WEIGHTS.items() if not name.endswith("conv1d.bias")}
    weights["lm_head.weight"] = rng.standard_normal((64, 24)).astype(np.float32)
    for i in range(3):
        for name, size in (("in_proj", 96), ("out_proj", 24)):
            bias = rng.standard_normal(size).astype(np.float32)
            weights[f"backbone.layers.{i}.mixer.{name}.bias"] = bias
    model, text = Mamba.from_hf(weights, config), literal.Mamba(weights, config)
    step = jax.jit(lambda state, token: model((state,), token))
    state = {name: np.zeros((1, *one.shape), one.dtype) for name, one in model.state.items()}
    for token in [*range(20), -1, -1, -1]:
        expected = text.step(token if token >= 0 else int(state["token"][0]))
        state = step(state, np.array([token], np.int32))
        assert agree(state["token"], [literal.best(expected)])


def test_a_bfloat16_model_keeps_some_parts_in_float32():
    model = Mamba.random(hidden_size=32, vocab_size=50, num_layers=2, dtype="bfloat16")
    state = {name: jax.ShapeDtypeStruct((2, *one.shape), one.dtype) for name, one in model.state.items()}
    state = jax.eval_shape(lambda *args: model(*args), (state,), jax.ShapeDtypeStruct((2,), "int32"))
    assert {name: str(one.dtype) for name, one in state.items()} == {
        "window": "bfloat16",
        "state": "float32",
        "token": "int32",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "model_type='mamba2' is not 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"state_size": 0}, "state_size=0 must be a positive integer"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id=\[1, 2\] must be one id or null"),
        ({"conv_kernel": 1}, "conv_kernel=1 must be at least 2"),
        ({"use_bias": 1}, "use_bias=1 must be true or false"),
        ({"expand": "2"}, "expand='2' must be a finite number above 0"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon='x' must be a finite number above 0"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon=nan must be a finite number above 0"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        Mamba.from_hf(WEIGHTS, CONFIG | changes)


def test_null_is_the_default():
    expected = Mamba.from_hf(WEIGHTS, CONFIG | {"expand": 2, "layer_norm_epsilon": 1e-5}).config
    assert Mamba.from_hf(WEIGHTS, CONFIG | {"expand": None, "layer_norm_epsilon": None}).config == expected


@pytest.mark.parametrize(("eos_token_id", "expected"), [(7, 7), ([7], 7), (None, None)])
def test_the_end_of_replies_is_one_id_or_none(eos_token_id, expected):
    assert parse_mamba(CONFIG | {"eos_token_id": eos_token_id}, "float32").eos_token_id == expected


def test_missing_options_have_the_defaults_of_transformers():
    """The defaults are those of `transformers.MambaConfig`; `time_step_rank` "auto" is ceil(hidden_size /
    16).
    """
    config = parse_mamba({"model_type": "mamba", "vocab_size": 50280, "hidden_size": 776}, "float32")
    assert config == MambaConfig(
        dtype="float32",
        vocab_size=50280,
        hidden_size=776,
        intermediate_size=2 * 776,
        num_layers=32,
        state_size=16,
        conv_kernel=4,
        time_step_rank=49,
        norm_eps=1e-5,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    sizes = {
        "vocab_size": 50280,
        "hidden_size": 776,
        "intermediate_size": 2 * 776,
        "num_layers": 32,
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": 49,
    }
    assert MambaConfig(dtype="float32", **sizes) == dataclasses.replace(config, eos_token_id=None)


def test_tensors_alone_are_not_enough():
    with pytest.raises(CheckpointError, match="pass its config"):
        Mamba.from_hf(WEIGHTS)
    expected = r"tensor 'backbone.layers.0.mixer.A_log' has shape \[48, 5\], expected \[72, 5\]"
    with pytest.raises(CheckpointError, match=expected):
        Mamba.from_hf(WEIGHTS, CONFIG | {"expand": 3})


def test_invalid_requests_are_refused(model):
    for args, kwargs, message in (
        (([], 1), {}, "prompt_ids is "),
        (([64], 1), {}, r"prompt_ids\[0\] is 64, but must be an id from 0 to 63"),
        (([1], 0), {}, "max_new_tokens is 0, but must be an int of at least 1"),
        (([1], 1), {"eos_id": -1}, "eos_id is -1, but must be an id from 0 to 63"),
    ):
        with pytest.raises(RequestError, match=message):
            model.request(*args, **kwargs)
