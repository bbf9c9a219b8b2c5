"""Weights kept in 8 bits: codes and scales, loading, saving, devices, and whose history it is."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_defs import (
    PRESETS,
    UnsupportedModelError,
    fingerprint,
    load_config,
    load_model,
    make_mesh,
    model_fingerprint,
    parameter_bytes,
    preset,
    random_model,
    save_parameters,
    small_batch_matmul,
    source_weights_dtype,
)
from model_defs.errors import CheckpointError
from model_defs.layers import Build, Linear
from model_defs.parameters import fill_parameters, named_parameters, source_names
from model_defs.weight_formats import FORMATS, decode, encode
from pallas_kernels import byte_matmul
from pensieve_jax.config import WEIGHTS_DTYPES
from tests.models.helpers import GOLDEN, dense_logits

INT8_FIRST = [pytest.param(name, marks=() if name == "int8" else pytest.mark.long) for name in FORMATS]
TOKEN_IDS = np.arange(3, 15, dtype=np.int32)
SHAPES = [
    ((64,), (4, 3, 16), {"out_axis": 0}),
    ((4, 16), (32,), {"in_axis": 0}),
    ((64,), (2, 32), {"out_axis": 1}),
]


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    return {name: np.asarray(parameter.get_value()) for name, parameter in named_parameters(model)}


def assert_same(one: nnx.Module, other: nnx.Module) -> None:
    found, expected = values(one), values(other)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_setting_exists_for_every_format() -> None:
    assert tuple(FORMATS) == WEIGHTS_DTYPES
    assert {one.dtype for one in FORMATS.values()} == set(byte_matmul.CODE_DTYPES)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_weights(name: str) -> None:
    """The largest weight of an output has the largest code; others are off by half a step at most."""
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((24, 2, 5)).astype(np.float32) * rng.uniform(0.01, 10, (1, 2, 5))
    codes, scale = encode(jnp.asarray(weights, jnp.float32), weights_dtype=name, num_in_dims=1)
    assert (codes.shape, scale.shape, codes.dtype) == ((2, 5, 24), (2, 5), FORMATS[name].dtype)
    largest = np.abs(np.asarray(codes, np.float32)).max(axis=-1)
    np.testing.assert_array_equal(largest, FORMATS[name].largest)
    again = np.asarray(decode(codes, scale, num_in_dims=1, dtype=jnp.float32))
    step = np.asarray(scale) if name == "int8" else np.abs(again).max(axis=0) / 448 * 32
    assert (np.abs(again - weights) <= 0.5001 * step).all()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_codes_are_the_same(name: str) -> None:
    """What a format can hold exactly, it holds, whatever the power of two of an output's scale."""
    rng = np.random.default_rng(6)
    codes = rng.integers(-127, 128, (7, 40)).astype(np.float32)
    codes[:, 0] = FORMATS[name].largest
    codes = np.asarray(jnp.asarray(codes, FORMATS[name].dtype), np.float32)
    scale = np.exp2(rng.integers(-9, 9, 7)).astype(np.float32)
    found, factors = encode(jnp.asarray((codes * scale[:, None]).T), weights_dtype=name, num_in_dims=1)
    np.testing.assert_array_equal(np.asarray(found, np.float32), codes)
    np.testing.assert_array_equal(factors, scale)


def test_zeros_and_weights_that_are_not_finite() -> None:
    weights = jnp.asarray([[0.0, np.nan, np.inf], [0.0, 1.0, 1.0]], jnp.float32)
    codes, scale = encode(weights, weights_dtype="int8", num_in_dims=1)
    assert scale[0] == 1 and not np.asarray(codes[0]).any()
    products = (jnp.ones((1, 2)) @ codes.astype(jnp.float32).T) * scale
    assert products[0, 0] == 0 and not np.isfinite(products[0, 1:]).any()


def linear(
    ins: Any, outs: Any, split: dict[str, int], *, dtype: str, num_devices: int = 1, **build: Any
) -> Linear:
    mesh = make_mesh(num_devices, jax.devices()[:num_devices])
    return Linear(Build(preset("llama-tiny"), jnp.dtype(dtype), mesh, **build), ins, outs, **split)


def filled_alike(module: Linear, weights: np.ndarray) -> Linear:
    def fill(name: str, parameter: Any) -> jax.Array:
        target = parameter.get_value()
        return jax.device_put(jnp.asarray(weights, target.dtype), target.sharding)

    fill_parameters(module, fill)
    return module


def exact_weights(ins: tuple[int, ...], outs: tuple[int, ...], name: str) -> np.ndarray:
    """Draw weights that a format holds exactly, and whose products with small integers are exact."""
    rng = np.random.default_rng(8)
    size = int(np.prod(outs))
    codes = rng.integers(-7, 8, (int(np.prod(ins)), size)).astype(np.float32)
    codes[0] = FORMATS[name].largest
    return (codes * np.exp2(rng.integers(-3, 2, size))).reshape(*ins, *outs)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("ins", "outs", "split"), SHAPES, ids=["qkv", "out", "gate_up"])
def test_kept_weights_give_the_same_products(
    ins: tuple[int, ...], outs: tuple[int, ...], split: dict[str, int], name: str, num_devices: int
) -> None:
    """Where all values are exact, the weights in 8 bits and those they stand for give equal products."""
    weights = exact_weights(ins, outs, name)
    plain = filled_alike(linear(ins, outs, split, dtype="float32"), weights)
    kept = filled_alike(
        linear(ins, outs, split, dtype="float32", num_devices=num_devices, weights_dtype=name), weights
    )
    x = jnp.asarray(np.random.default_rng(9).integers(-3, 4, (5, *ins)), jnp.float32)
    np.testing.assert_array_equal(kept(x), plain(x))
    if outs[0] == 2:
        np.testing.assert_allclose(kept.gated(x, "silu"), plain.gated(x, "silu"), rtol=1e-6)


@pytest.mark.parametrize("planted", ["twice", "left out"])
def test_a_scale_applied_twice_or_left_out_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ins, outs, split = SHAPES[0]
    weights = exact_weights(ins, outs, "int8")
    plain = filled_alike(linear(ins, outs, split, dtype="float32"), weights)
    kept = filled_alike(linear(ins, outs, split, dtype="float32", weights_dtype="int8"), weights)
    x = jnp.ones((3, *ins))
    np.testing.assert_array_equal(kept(x), plain(x))
    scale = kept.scale[...]
    kept.scale.set_value(scale * scale if planted == "twice" else jnp.ones_like(scale))
    assert not np.array_equal(kept(x), plain(x))


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(("ins", "outs", "split"), SHAPES, ids=["qkv", "out", "gate_up"])
def test_small_steps_ask_the_kernel(
    ins: tuple[int, ...],
    outs: tuple[int, ...],
    split: dict[str, int],
    num_devices: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each device multiplies its part, as codes [columns, depth]; XLA stands in for the kernel."""
    by_xla, calls = byte_matmul.byte_matmul, []

    def product(x: Any, codes: Any, scale: Any, bias: Any, *, backend: str, **options: Any) -> jax.Array:
        calls.append((x.shape, codes.shape, scale.shape, options["gated"], backend))
        assert options["activation"] == "silu"
        return by_xla(x, codes, scale, bias, backend="xla", **options)

    monkeypatch.setattr(byte_matmul, "supports", lambda num_rows, *_, **__: num_rows <= 8)
    monkeypatch.setattr(byte_matmul, "byte_matmul", product)
    module = filled_alike(
        linear(ins, outs, split, dtype="bfloat16", num_devices=num_devices, weights_dtype="int8"),
        exact_weights(ins, outs, "int8"),
    )
    x = jnp.asarray(np.random.default_rng(9).integers(-3, 4, (5, *ins)), jnp.bfloat16)
    gated = outs[0] == 2
    run = functools.partial(module.gated, gate="silu") if gated else module
    expected = run(x)
    with small_batch_matmul.multiplying_by("pallas_mosaic_gpu"):
        found = run(x)
    np.testing.assert_allclose(
        found.astype(np.float32),
        expected.astype(np.float32),
        rtol=0.02,
        atol=0.02 * float(jnp.abs(expected).max()),
    )
    depth, columns = int(np.prod(ins)), int(np.prod(outs))
    depth, columns = (
        (depth // num_devices, columns) if "in_axis" in split else (depth, columns // num_devices)
    )
    assert calls == [((5, depth), (columns, depth), (columns,), gated, "pallas_mosaic_gpu")]


@pytest.mark.parametrize("name", ["llama-tiny", "opt-tiny"])
def test_which_weights_are_kept(name: str) -> None:
    """Those of projections in layers; random weights are drawn as always, and then become codes."""
    plain = load_model(f"random:{name}", dtype="float32", mesh=make_mesh(1), seed=3)
    model = load_model(f"random:{name}", dtype="float32", mesh=make_mesh(1), seed=3, weights_dtype="int8")
    assert (model.compute_dtype, model.weights_dtype) == (jnp.float32, "int8")
    assert source_names(model) == [one for one, _ in named_parameters(plain)]
    expected, found = values(plain), values(model)
    for one, value in expected.items():
        if not one.endswith(".kernel"):
            np.testing.assert_array_equal(found.pop(one), value)
            continue
        codes, scale = found.pop(one), found.pop(one.removesuffix(".kernel") + ".scale")
        assert codes.dtype == np.int8 and one.startswith("layers.")
        num_ins = value.ndim - scale.ndim
        again = decode(jnp.asarray(codes), jnp.asarray(scale), num_in_dims=num_ins, dtype=jnp.float32)
        assert np.abs(again - value).max() <= 0.5001 * scale.max()
    assert not found
    num_bytes = parameter_bytes(model.config, dtype="float32", weights_dtype="int8")
    assert num_bytes == sum(value.nbytes for value in values(model).values())


def test_a_projection_outside_of_layers_keeps_its_dtype() -> None:
    model = load_model(GOLDEN / "opt_post_norm", dtype="float32", mesh=make_mesh(1), weights_dtype="fp8")
    outer = [name for name in values(model) if name.startswith(("project_in", "project_out"))]
    assert outer == ["project_in.kernel", "project_out.kernel"]
    assert all(values(model)[name].dtype == np.float32 for name in outer)


@pytest.mark.parametrize("name", INT8_FIRST)
def test_two_devices(name: str) -> None:
    """They have the codes of one device, and its logits up to the order of sums."""
    config = preset("llama-tiny")
    one, two = (
        random_model(config, dtype="float32", mesh=make_mesh(tp), seed=3, weights_dtype=name) for tp in (1, 2)
    )
    assert_same(two, one)
    np.testing.assert_allclose(dense_logits(two, TOKEN_IDS), dense_logits(one, TOKEN_IDS), atol=2e-4, rtol=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """Save a model as it is, and in each format."""
    found: dict[str | None, Path] = {}
    for name in (None, *FORMATS):
        path = found[name] = tmp_path_factory.mktemp("saved") / str(name)
        model = load_model(
            "random:llama-tiny", dtype="float32", mesh=make_mesh(1), seed=3, weights_dtype=name
        )
        save_parameters(model, path, weights_digest="d")
    return found


@pytest.mark.parametrize("name", INT8_FIRST)
def test_saved_codes_are_restored(saved: dict[str | None, Path], name: str) -> None:
    """As they are, onto any mesh; a save without codes becomes the same ones."""
    expected = load_model("random:llama-tiny", dtype="float32", mesh=make_mesh(1), seed=3, weights_dtype=name)
    calls: list[tuple[int, int, str]] = []
    for tp in (1, 2):
        assert_same(load_model(saved[name], mesh=make_mesh(tp)), expected)
    made = load_model(
        saved[None], mesh=make_mesh(2), weights_dtype=name, progress=lambda *call: calls.append(call)
    )
    assert_same(made, expected)
    assert [call[0] for call in calls] == list(range(1, calls[-1][1] + 1))
    assert load_config(saved[name]).dtype == "float32", "that of the computation"
    assert load_model(saved[name], dtype="bfloat16", mesh=make_mesh(1)).compute_dtype == jnp.bfloat16


def test_a_directory_of_the_older_version_loads(saved: dict[str | None, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[None], tmp_path / "older")
    path = tmp_path / "older" / "model_config.json"
    written = json.loads(path.read_text())
    assert written["format_version"] == 3 and written.pop("weights_dtype") is None
    path.write_text(json.dumps(written | {"format_version": 2}))
    assert_same(load_model(path.parent, mesh=make_mesh(1)), load_model(saved[None], mesh=make_mesh(1)))
    path.write_text(json.dumps(written | {"weights_dtype": 8}))
    with pytest.raises(CheckpointError, match="'weights_dtype' is 8, but must be str or null"):
        load_model(path.parent, mesh=make_mesh(1))
    path.write_text(json.dumps(written | {"weights_dtype": "int4"}))
    with pytest.raises(UnsupportedModelError, match="weights_dtype='int4' is not one of int8, fp8"):
        load_model(path.parent, mesh=make_mesh(1))


def test_codes_are_not_rounded_again(saved: dict[str | None, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"weights_dtype='fp8' must be 'int8' or None for .*int8"):
        load_model(saved["int8"], mesh=make_mesh(1), weights_dtype="fp8")
    with pytest.raises(UnsupportedModelError, match="weights_dtype='int3' is not one of int8, fp8"):
        load_model("random:llama-tiny", mesh=make_mesh(1), weights_dtype="int3")
    asked = [(None, None), (None, "int8"), ("int8", None), ("int8", "int8")]
    assert [source_weights_dtype(saved[own], wanted) for own, wanted in asked] == [None, *["int8"] * 3]


def test_a_history_belongs_to_a_format(
    saved: dict[str | None, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint of weights in 16 or 32 bits is as before there were others."""
    config, source = preset("llama-tiny"), "random:llama-tiny"

    def prints() -> list[str]:
        return [model_fingerprint(config, source, weights_dtype=name) for name in (None, *FORMATS)]

    assert len(set(prints())) == 3 and prints()[0] == model_fingerprint(config, source)
    found = load_config(saved["int8"])
    assert model_fingerprint(found, saved["int8"]) == model_fingerprint(
        found, saved[None], weights_dtype="int8"
    )
    monkeypatch.setattr(fingerprint, "source_weights_dtype", lambda source, wanted: None)
    assert len(set(prints())) == 1, "planted: a fingerprint without the format takes all for one model"


def test_a_checkpoint_of_hugging_face(tmp_path: Path) -> None:
    """Codes are made of the checkpoint's weights; a position table may be cut meanwhile."""
    for variant in ("qwen3_bias", "opt_pre_norm"):
        plain = load_model(GOLDEN / variant, dtype="float32", mesh=make_mesh(1), max_position_embeddings=40)
        kept = load_model(
            GOLDEN / variant,
            dtype="float32",
            mesh=make_mesh(1),
            max_position_embeddings=40,
            weights_dtype="int8",
        )
        expected, found = (dense_logits(model, TOKEN_IDS) for model in (plain, kept))
        assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
        path = tmp_path / variant
        save_parameters(plain, path, weights_digest="d")
        assert_same(load_model(path, mesh=make_mesh(1), weights_dtype="int8"), kept)
    assert dataclasses.replace(kept.config, max_position_embeddings=48) == load_config(GOLDEN / variant)


def test_mixtures_of_experts_and_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    """Experts would keep their dtype in silence, and codes would be rounded a second time."""
    with pytest.raises(UnsupportedModelError, match="must be None for a mixture of experts"):
        load_model("random:mixtral-tiny", mesh=make_mesh(1), weights_dtype="int8")
    source = shutil.copytree(GOLDEN / "qwen3_bias", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="whose weights are quantized already"):
        source_weights_dtype(source, "int8")
    assert source_weights_dtype(source, None) is None


DENSE = [name for name, config in PRESETS.items() if name.endswith("-tiny") and config.experts is None]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3-tiny" else pytest.mark.long) for name in DENSE]
)
def test_every_dense_family(name: str) -> None:
    """Logits differ from those of the plain weights, and little."""
    models = [
        load_model(f"random:{name}", dtype="float32", mesh=make_mesh(1), seed=3, weights_dtype=weights_dtype)
        for weights_dtype in (None, "int8")
    ]
    expected, found = (dense_logits(model, TOKEN_IDS) for model in models)
    assert 0 < np.abs(found - expected).max() < 0.15 * np.abs(expected).max()
