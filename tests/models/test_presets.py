"""Presets: sizes, overrides, random weights, and a step of each lowered for an NVIDIA GPU."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from model_defs import (
    KV_PAGES_SPEC,
    PRESETS,
    ModelConfig,
    PagedAttention,
    RaggedBatch,
    UnsupportedModelError,
    abstract_model,
    kv_bytes_per_token,
    load_model,
    make_mesh,
    model_fingerprint,
    num_parameters,
    parameter_bytes,
    preset,
    random_model,
)
from model_defs.hf_config import hf_config, parse_hf_config
from model_defs.parameters import named_parameters
from model_defs.random_weights import uniform
from model_defs.registry import FAMILIES
from tests.models.helpers import PAGE_SIZE, abstract_batch, dense_logits, make_tile_specs

BILLIONS = {
    "opt-125m": 0.125,
    "opt-13b": 12.85,
    "opt-66b": 65.7,
    "llama2-13b": 13.02,
    "llama2-13b-gqa10": 11.44,
    "llama2-70b": 68.98,
    "llama2-7b": 6.74,
    "llama3-8b": 8.03,
    "qwen2.5-7b": 7.62,
    "qwen3-8b": 8.19,
    "mistral-7b": 7.25,
    "mistral-small-24b": 23.57,
    "ministral3-8b": 8.49,
    "seed-oss-36b": 36.15,
    "phi4": 14.66,
    "granite-8b": 8.171,
    "gpt2": 0.1244,
    "gpt2-large": 0.774,
    "olmo2-7b": 7.30,
    "qwen3-30b-a3b": 30.53,
    "mixtral-8x7b": 46.70,
    "glm4-9b": 9.40,
    "smollm3-3b": 3.08,
    "olmo3-7b": 7.30,
    "command-r7b": 8.03,
    "gemma3-12b": 11.77,
    "gemma2-9b": 9.24,
}
TINY = [
    "opt-tiny",
    "llama-tiny",
    "qwen2-tiny",
    "qwen3-tiny",
    "mistral-tiny",
    "ministral3-tiny",
    "seed_oss-tiny",
    "phi3-tiny",
    "granite-tiny",
    "gpt2-tiny",
    "olmo2-tiny",
    "glm4-tiny",
    "smollm3-tiny",
    "olmo3-tiny",
    "cohere2-tiny",
    "gemma3-tiny",
    "gemma2-tiny",
    "qwen3_moe-tiny",
    "mixtral-tiny",
]
WINDOWED = ["qwen3-window-tiny", "mistral-window-tiny"]
TINY += WINDOWED
QUICK = [*TINY, "opt-13b", "llama2-13b-gqa10"]  # the others differ only in numbers
RESIDUAL_KERNELS = (".out.kernel", ".down.kernel", ".fc2.kernel", ".experts.down")


@pytest.mark.parametrize("name", BILLIONS)
def test_published_sizes(name: str) -> None:
    assert num_parameters(preset(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.004)


def test_every_preset_is_checked() -> None:
    assert set(PRESETS) == {*BILLIONS, *TINY}


def test_bytes() -> None:
    config = preset("llama2-13b-gqa10")
    assert parameter_bytes(config, dtype="bfloat16") == 2 * num_parameters(config)
    assert parameter_bytes(config, dtype="float32") == 4 * num_parameters(config)
    assert kv_bytes_per_token(config, dtype="bfloat16") == 40 * 2 * 10 * 128 * 2  # 6.5 MB per chunk of 32
    assert kv_bytes_per_token(config, dtype="bfloat16", tensor_parallel_size=2) == 40 * 2 * 5 * 128 * 2
    halves = parameter_bytes(config, dtype="bfloat16", tensor_parallel_size=2)
    assert num_parameters(config) <= halves < 1.001 * num_parameters(config)  # norms are replicated


@pytest.mark.parametrize("source", ["random:opt-14b", "random:"])
def test_unknown_preset(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"preset .* is unknown; choose one of opt-125m"):
        load_model(source, mesh=make_mesh(1))


def test_unknown_field_and_dtype() -> None:
    with pytest.raises(UnsupportedModelError, match="preset field num_layer is unknown"):
        preset("opt-13b", num_layer=2)
    with pytest.raises(UnsupportedModelError, match="dtype='int8' must be"):
        load_model("random:llama-tiny", dtype="int8", mesh=make_mesh(1))


@pytest.mark.long
@pytest.mark.parametrize("name", TINY)
def test_random_weights_do_not_depend_on_the_mesh(name: str) -> None:
    models = [load_model(f"random:{name}", mesh=make_mesh(tp), seed=7) for tp in (1, 2)]
    other_seed = load_model(f"random:{name}", mesh=make_mesh(1), seed=8)
    values = {}
    for model, other in zip(*(named_parameters(model) for model in models), strict=True):
        np.testing.assert_array_equal(model[1].get_value(), other[1].get_value())
        values[model[0]] = np.asarray(model[1].get_value())
    drawn = {n: value for n, value in values.items() if value.ndim > 1 and not n.endswith("norm.scale")}
    expected = dict.fromkeys(drawn, 0.3)
    for name in drawn:
        if name.endswith(RESIDUAL_KERNELS):
            expected[name] = 0.3 / (2 * models[0].config.num_layers) ** 0.5  # two terms per layer
        elif name == "embed.table" and "head.table" in drawn:
            expected[name] = 2.0
    for name, value in drawn.items():
        tolerance = max(0.06, 3 / value.size**0.5)  # a small router has few values
        assert value.std() == pytest.approx(expected[name], rel=tolerance), name
        assert abs(value.mean()) < (0.01 + tolerance) * expected[name], name
    assert len({value.tobytes()[:64] for value in drawn.values()}) == len(drawn)
    for key, parameter in named_parameters(other_seed):
        assert key.endswith("norm.scale") or not np.array_equal(values[key], parameter.get_value())


def test_random_weights_do_not_depend_on_the_number_of_layers_or_positions() -> None:
    short = preset("opt-tiny", num_layers=1, max_position_embeddings=64)
    few = dict(named_parameters(random_model(short, mesh=make_mesh(1))))
    many = dict(named_parameters(load_model("random:opt-tiny", mesh=make_mesh(1))))
    assert many.keys() > few.keys()
    for name, parameter in few.items():
        value = parameter.get_value()
        # The terms added to the residual stream are smaller if there are more of them.
        scale = 2**-0.5 if name.endswith(RESIDUAL_KERNELS) else 1.0
        np.testing.assert_allclose(many[name].get_value()[: value.shape[0]], value * scale, rtol=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_read_their_context(name: str) -> None:
    """The next token varies along a sequence, and a change of an early token changes late logits."""
    model = load_model(f"random:{name}", mesh=make_mesh(1))
    token_ids = np.random.default_rng(0).integers(4, 320, 64).astype(np.int32)
    logits = dense_logits(model, token_ids)
    assert len(set(logits.argmax(-1).tolist())) > 15
    token_ids[1] += 1  # two windows of 32 reach back 62 tokens
    assert np.abs(dense_logits(model, token_ids)[-1] - logits[-1]).max() > 1e-2


def test_more_positions_than_published() -> None:
    model = load_model("random:opt-tiny", mesh=make_mesh(1), max_position_embeddings=5000)
    assert model.config.max_position_embeddings == 5000
    assert dict(named_parameters(model))["position_table"].get_value().shape == (5002, 64)


def test_fingerprints_tell_models_apart() -> None:
    config = preset("llama-tiny")
    prints = {
        model_fingerprint(config, "random:llama-tiny"),
        model_fingerprint(config, "random:llama-tiny", seed=1),
        model_fingerprint(preset("opt-tiny"), "random:opt-tiny"),
        model_fingerprint(preset("llama-tiny", num_layers=3), "random:llama-tiny"),
    }
    assert len(prints) == 4
    longer = preset("llama-tiny", max_position_embeddings=9, dtype="bfloat16")
    assert model_fingerprint(longer, "random:llama-tiny") in prints


def lower_step_for_cuda(name: str, tp: int, dtype: str, num_tokens: int, backend: str) -> str:
    """Return the StableHLO of one step of two layers of the preset, for an absent H200."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((tp,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    config = preset(name, num_layers=2)
    graph, state = nnx.split(abstract_model(config, dtype=dtype, mesh=mesh))
    num_rows, pages_per_row, num_pages = min(8, num_tokens), 16, 128
    specs = make_tile_specs(config, mesh, num_tokens, num_rows, dtype, backend)

    def step(
        state: nnx.State,
        pools: list[jax.Array],
        token_ids: jax.Array,
        positions: jax.Array,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, list[jax.Array]]:
        model = nnx.merge(graph, state)
        attention = PagedAttention(pools, batch, mesh=mesh, tile_specs=specs, backend=backend)
        hidden = model(token_ids, positions, attention)
        return model.compute_logits(hidden[:num_rows]), attention.kv_pages

    replicated = NamedSharding(mesh, PartitionSpec())
    pool_shape = (num_pages, PAGE_SIZE, 2 * config.num_kv_heads, config.head_dim)
    pool = jax.ShapeDtypeStruct(pool_shape, dtype, sharding=NamedSharding(mesh, KV_PAGES_SPEC))
    tokens = jax.ShapeDtypeStruct((num_tokens,), jnp.int32, sharding=replicated)
    batch = abstract_batch(replicated, num_tokens, num_rows, pages_per_row, specs)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*Triton backend is deprecated", category=DeprecationWarning
        )
        traced = jax.jit(step, donate_argnums=1).trace(state, [pool] * 2, tokens, tokens, batch)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


HOW_LOWERED = ((1, 1), (256, 2))  # tokens, devices
LOWERED_QUICKLY = [(name, HOW_LOWERED[i % 2]) for i, name in enumerate(QUICK)]


@pytest.mark.parametrize(
    ("name", "num_tokens", "tp"),
    [
        pytest.param(name, *how, marks=() if (name, how) in LOWERED_QUICKLY else pytest.mark.long)
        for name in PRESETS
        for how in HOW_LOWERED
    ],
)
def test_step_lowers_for_cuda(name: str, num_tokens: int, tp: int) -> None:
    dtype = "float32" if name in TINY else "bfloat16"
    text = lower_step_for_cuda(name, tp, dtype, num_tokens, "pallas_triton")
    assert text.count("triton") >= 1
    config = preset(name)
    assert f"tensor<{config.vocab_size}x{config.hidden_size}x{'f32' if name in TINY else 'bf16'}>" in text


def test_float32_asks_for_full_precision() -> None:
    text = lower_step_for_cuda("llama-tiny", 1, "float32", 16, "xla")
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) > 8 and all("HIGHEST" in line for line in dots)
    half = lower_step_for_cuda("llama-tiny", 1, "bfloat16", 16, "pallas_triton")
    assert "HIGHEST" not in "".join(line for line in half.splitlines() if "dot_general" in line)


def test_configs_survive_json() -> None:
    for config in PRESETS.values():
        assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert len({hash(config) for config in PRESETS.values()}) == len(PRESETS)
    with pytest.raises(UnsupportedModelError, match="num_experts"):
        ModelConfig.from_json(preset("llama-tiny").to_json() | {"num_experts": 8})


def test_uniform_never_reaches_its_ends() -> None:
    bits = jnp.array([0, 1, 2**31, 2**32 - 256, 2**32 - 1], jnp.uint32)
    values = np.asarray(uniform(bits))
    assert (values > 0).all() and (values < 1).all()
    assert values[2] == pytest.approx(0.5)


@pytest.mark.long
def test_random_weights_are_finite() -> None:
    """Of this many draws, a few come within 2**-24 of an end."""
    model = random_model(preset("opt-125m", num_layers=1), dtype="float32", mesh=make_mesh(1))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("family", FAMILIES)
def test_too_many_layers_are_refused_by_name(family: str) -> None:
    """Several families list the kinds of all layers before anything else is read."""
    name = next(iter(FAMILIES[family].presets))
    values = hf_config(preset(name)) | {"sliding_window": 8}
    if family in ("qwen2", "qwen3", "smollm3"):
        values["use_sliding_window"] = True
    for option in ("layer_types", "no_rope_layers", "num_hidden_layers", "n_layer"):
        values.pop(option, None)
    values["n_layer" if family == "gpt2" else "num_hidden_layers"] = 10**5
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers=100000 must be at most 10000"):
        parse_hf_config(values)
