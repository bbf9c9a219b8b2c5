"""Layers of several kinds: windows, rotations and the options of attention, dense and over pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import (
    AttentionOptions,
    DenseAttention,
    ExpertsConfig,
    LayerKind,
    Model,
    ModelConfig,
    PagedAttention,
    RaggedBatch,
    RopeConfig,
    UnsupportedModelError,
    abstract_model,
    make_mesh,
    preset,
    random_model,
)
from tests.models.helpers import PagedStep, dense_logits

IDS = np.random.default_rng(3).integers(3, 320, 90).astype(np.int32)
WINDOW = 21
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"layer_kinds": (LayerKind(window=WINDOW),) * 2},
    "some windows": {"layer_kinds": (LayerKind(window=WINDOW), LayerKind())},
    "two windows": {"layer_kinds": (LayerKind(window=1), LayerKind(window=40))},
    "two ropes": {
        "ropes": (RopeConfig(), RopeConfig(theta=100.0)),
        "layer_kinds": (LayerKind(rope=1), LayerKind(window=WINDOW)),
    },
    "no rope": {"layer_kinds": (LayerKind(window=WINDOW), LayerKind(rope=None))},
    "scores": {
        "layer_kinds": (LayerKind(window=WINDOW), LayerKind()),
        "attention_scale": 0.3,
        "attention_softcap": 2.0,
        "has_sinks": True,
    },
}
QUICK = [("two windows", 1), ("two ropes", 1), ("no rope", 1), ("scores", 2)]


def model_of(num_devices: int = 1, **fields: Any) -> Model:
    return random_model(preset("qwen3-tiny", **fields), dtype="float32", mesh=make_mesh(num_devices), seed=1)


@pytest.mark.parametrize(
    ("feature", "num_devices"),
    [
        pytest.param(feature, num, marks=() if (feature, num) in QUICK else pytest.mark.long)
        for feature in FEATURES
        for num in (1, 2)
    ],
)
def test_pages_in_pieces_equal_one_dense_pass(feature: str, num_devices: int) -> None:
    """Pieces end at and beside the edges of windows and pages; unwritten pages hold NaN."""
    expected = dense_logits(model_of(**FEATURES[feature]), IDS)
    plain = dense_logits(model_of(), IDS)
    assert np.abs(expected - plain)[-10:].max() > 0.05, "the feature changes nothing"
    mesh = make_mesh(num_devices)
    step = PagedStep(model_of(num_devices, **FEATURES[feature]), mesh, capacity=48)
    pages, got = np.array([9, 2, 5, 7, 3, 1]), []
    for start, end in ((0, 20), (20, 21), (21, 22), (22, 64), (64, 65), (65, 90)):
        got.append(step([(IDS[start:end], start, pages)])[0])
    np.testing.assert_allclose(np.concatenate(got), expected, atol=1e-4, rtol=0)


def test_a_window_reaches_back_as_far_as_its_layers() -> None:
    """A token sees `window` tokens, itself included; each layer sees through the one before it."""
    model = model_of(layer_kinds=(LayerKind(window=10), LayerKind(window=6)))
    before = dense_logits(model, IDS)
    ids = IDS.copy()
    ids[30] += 1
    changed = np.flatnonzero(np.abs(dense_logits(model, ids) - before).max(axis=1))
    assert changed.tolist() == list(range(30, 30 + 9 + 5 + 1))


@pytest.mark.parametrize("window", [1, 7, 20, 89])
def test_dense_attention_with_a_window(window: int) -> None:
    """Compares with NumPy, which computes one query at a time."""
    rng = np.random.default_rng(window)
    q, k, v = (rng.standard_normal((90, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    sinks = np.array([-20, 0, 3, 20], np.float32)
    options = AttentionOptions(window=window, softcap=1.5, scale=0.7)
    out = np.asarray(DenseAttention()(0, *map(jnp.asarray, (q, k, v)), options=options, sinks=sinks))
    for token in range(90):
        seen = slice(max(token - window + 1, 0), token + 1)
        for head in range(4):
            scores = 1.5 * np.tanh(0.7 * k[seen, head // 2] @ q[token, head] / 1.5)
            weights = np.exp(scores)
            expected = weights @ v[seen, head // 2] / (weights.sum() + np.exp(sinks[head]))
            np.testing.assert_allclose(out[token, head], expected, atol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "auto"])
def test_attention_over_pages_makes_its_own_lists(backend: str) -> None:
    """Without lists from a plan, for each layer's options."""
    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.standard_normal((48, heads, 32)), jnp.float32) for heads in (4, 2, 2))
    batch = RaggedBatch(
        write_slots=jnp.arange(48, dtype=jnp.int32),
        kv_lens=jnp.array([48], jnp.int32),
        page_indices=jnp.arange(3, dtype=jnp.int32)[None],
        cu_q_lens=jnp.array([0, 48], jnp.int32),
        num_seqs=jnp.array([1], jnp.int32),
        tiles=(),
    )
    pools = [jnp.full((3, 16, 4, 32), jnp.nan)] * 2
    attention = PagedAttention(pools, batch, mesh=make_mesh(1), backend=backend)
    sinks = jnp.array([-20.0, 0, 3, 20])
    for layer, options in enumerate((AttentionOptions(window=9, softcap=1.5), AttentionOptions(scale=0.4))):
        expected = DenseAttention()(0, q, k, v, options=options, sinks=sinks)
        found = attention(layer, q, k, v, options=options, sinks=sinks)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_window_that_covers_the_context_changes_no_bit() -> None:
    plain = preset("qwen3-tiny", max_position_embeddings=90)
    for window in (90, 91, 10**12):
        config = dataclasses.replace(plain, layer_kinds=(LayerKind(window=window),) * 2)
        assert config.windows == (None,)
        model = random_model(config, dtype="float32", mesh=make_mesh(1), seed=1)
        np.testing.assert_array_equal(dense_logits(model, IDS), dense_logits(model_of(), IDS))
    assert dataclasses.replace(plain, layer_kinds=(LayerKind(window=89),) * 2).windows == (89,)


def test_windows_that_cover_the_context_count_as_none() -> None:
    kinds = tuple(LayerKind(window=window) for window in (None, 4, 90, 100))
    config = preset("qwen3-tiny", num_layers=4, max_position_embeddings=90, layer_kinds=kinds)
    assert config.windows == (None, 4)
    with pytest.raises(UnsupportedModelError, match=r"windows \[None, 4, 90\] of a context of 95 must be"):
        config.with_context(95)


def run_layers(model: Model, x: jax.Array, positions: jax.Array, start: int, stop: int) -> np.ndarray:
    return np.asarray(model.run_layers(x, positions, DenseAttention(), start, stop))


def test_each_layer_rotates_by_its_own_rope() -> None:
    """Models of one rope each give the layers' outputs; without a rope, all positions are alike."""
    ropes = RopeConfig(), RopeConfig(theta=100.0)
    kinds = LayerKind(rope=1), LayerKind(rope=0), LayerKind(rope=None)
    size = {"num_layers": 3}
    model = model_of(**size, ropes=ropes, layer_kinds=kinds)
    alone = [model_of(**size, ropes=(rope,)) for rope in ropes]
    positions = jnp.arange(90, dtype=jnp.int32)
    x = model.embed_tokens(jnp.asarray(IDS), positions)
    outputs = [run_layers(one, x, positions, 0, 1) for one in (model, *alone)]
    np.testing.assert_array_equal(outputs[0], outputs[2])
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-2
    np.testing.assert_array_equal(
        run_layers(model, x, positions, 1, 2), run_layers(alone[0], x, positions, 1, 2)
    )
    still = run_layers(model, x, positions, 2, 3)
    np.testing.assert_array_equal(still, run_layers(alone[0], x, jnp.zeros_like(positions), 2, 3))
    whole = run_layers(model, x, positions, 0, 3)
    for layer in range(3):
        x = jnp.asarray(run_layers(model, x, positions, layer, layer + 1))
    np.testing.assert_allclose(whole, x, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_kinds": (LayerKind(),)}, "layer_kinds has 1 entries; it must have num_layers=2, or none"),
        ({"layer_kinds": (LayerKind(rope=1), LayerKind())}, "rope=1 must be below 1, the number of ropes"),
        (
            {"num_layers": 3, "layer_kinds": (LayerKind(window=4), LayerKind(), LayerKind(window=9))},
            r"windows \[None, 4, 9\] of a context of \d+ must be at most 2 different ones",
        ),
        (
            {
                "num_layers": 3,
                "max_position_embeddings": 10,
                "layer_kinds": (LayerKind(window=4), LayerKind(window=8), LayerKind(window=10)),
            },
            r"windows \[None, 4, 8\] of a context of 10 must be at most 2 different ones",
        ),
        ({"ropes": ()}, "ropes=.* must have at least one entry"),
        ({"attention_softcap": -1.0}, "attention_softcap=-1.0 must be a finite number above 0, or null"),
        ({"attention_scale": float("nan")}, "attention_scale=nan must be a finite number above 0, or null"),
    ],
)
def test_kinds_that_do_not_fit_the_model(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        preset("qwen3-tiny", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window=0 must be a positive integer, or null"),
        ({"window": True}, "window=True must be a positive integer, or null"),
        ({"rope": -1}, "rope=-1 must be an integer of at least 0, or null"),
        ({"mlp": "sparse"}, "mlp='sparse' is not one of dense, moe"),
    ],
)
def test_values_of_a_kind(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        LayerKind(**fields)


def test_a_family_without_a_feature_refuses_it() -> None:
    for name, fields, message in (
        ("opt-tiny", {"layer_kinds": (LayerKind(window=8),) * 2}, "layer_kinds=.* is not supported by 'opt'"),
        ("opt-tiny", {"has_sinks": True}, "has_sinks=True is not supported by 'opt'"),
        ("gpt2-tiny", {"embedding_scale": 2.0}, "embedding_scale=2.0 is not supported by 'gpt2'; 1.0 is"),
        (
            "opt-tiny",
            {"layer_kinds": (LayerKind(mlp="moe"),) * 2, "experts": ExpertsConfig(4, 2, 32)},
            "layer_kinds=.* is not supported by 'opt'",
        ),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            abstract_model(preset(name, **fields), dtype="auto", mesh=make_mesh(1))


def test_a_part_of_the_layers_is_a_model() -> None:
    kinds = LayerKind(window=8), LayerKind(), LayerKind(rope=None)
    config: ModelConfig = preset("qwen3-tiny", num_layers=3, layer_kinds=kinds)
    part = config.with_layers(range(1, 3))
    assert (part.num_layers, part.layer_kinds) == (2, kinds[1:])
    assert config.with_layers(range(1, 2)).layer_kinds == ()
    assert preset("qwen3-window-tiny", num_layers=1).layer_kinds == (LayerKind(window=32),)
