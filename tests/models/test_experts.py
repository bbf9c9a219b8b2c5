"""Mixture of experts: routing against a plain definition, weights, padding, and planted bugs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from model_defs import (
    ExpertsConfig,
    LayerKind,
    ModelConfig,
    UnsupportedModelError,
    load_config,
    load_model,
    make_mesh,
    model_fingerprint,
    num_active_parameters,
    num_layer_parameters,
    num_parameters,
    preset,
    random_model,
)
from model_defs import experts as experts_module
from model_defs.experts import ExpertMLP, choose_experts, computing_experts
from model_defs.hf_config import hf_config, parse_hf_config
from model_defs.parameters import named_parameters
from tests.models.helpers import GOLDEN, dense_logits, golden
from tests.models.test_hf_config import without

CONFIG = preset("qwen3_moe-tiny")
QWEN3_MOE: dict[str, Any] = {  # Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
CODER_30B = QWEN3_MOE | {"max_position_embeddings": 262144, "rope_theta": 10000000, "intermediate_size": 5472}
CODER_30B |= {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
QWEN3_235B = QWEN3_MOE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
MIXTRAL: dict[str, Any] = {  # Mixtral-8x7B-Instruct-v0.1
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
MIXTRAL_8X22B = MIXTRAL | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
}


@pytest.mark.parametrize(
    ("values", "billions", "active"),
    [
        (QWEN3_MOE, 30.53, 3.35),
        (CODER_30B, 30.53, 3.35),
        (QWEN3_235B, 235.09, 22.19),
        (MIXTRAL, 46.70, 12.88),
        (MIXTRAL_8X22B, 140.62, 39.15),
    ],
)
def test_published_configs(values: dict[str, Any], billions: float, active: float) -> None:
    config = parse_hf_config(values)
    assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert num_active_parameters(config) / 1e9 == pytest.approx(active, rel=2e-3)
    assert parse_hf_config(hf_config(config)) == config
    assert parse_hf_config(without(values, "architectures")) == config
    tables = 2 * config.vocab_size * config.hidden_size + config.hidden_size
    assert num_layer_parameters(config) == num_active_parameters(config) - tables


def test_presets_are_published_models() -> None:
    assert parse_hf_config(QWEN3_MOE) == preset("qwen3-30b-a3b")
    assert parse_hf_config(MIXTRAL) == preset("mixtral-8x7b")


def test_options() -> None:
    """Layers without experts keep the MLP of `intermediate_size`; transformers 5 renames `num_experts`."""
    base = parse_hf_config(QWEN3_MOE)
    some = parse_hf_config(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]})
    moe = [layer for layer, kind in enumerate(some.kinds) if kind.mlp == "moe"]
    assert moe == [layer for layer in range(1, 48, 2) if layer != 3]
    assert parse_hf_config(hf_config(some)) == some
    renamed = without(QWEN3_MOE, "num_experts") | {"num_local_experts": 128}
    assert parse_hf_config(renamed) == base == parse_hf_config(QWEN3_MOE | {"num_local_experts": 128})
    assert not parse_hf_config(without(QWEN3_MOE, "norm_topk_prob")).experts.normalized
    lacking = without(
        QWEN3_MOE, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"
    )
    assert parse_hf_config(lacking) == base
    windowed = parse_hf_config(MIXTRAL | {"sliding_window": 4096})
    assert set(windowed.kinds) == {LayerKind(window=4096, mlp="moe")}
    assert parse_hf_config(hf_config(windowed)) == windowed
    lacking = without(MIXTRAL, "num_local_experts", "num_experts_per_tok", "rope_theta", "rms_norm_eps")
    assert parse_hf_config(lacking) == parse_hf_config(MIXTRAL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (QWEN3_MOE | {"num_local_experts": 64}, "num_experts=128 with a different num_local_experts=64"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts=0 must be a positive integer"),
        (QWEN3_MOE | {"num_experts_per_tok": 129}, "experts.num_chosen=129 must be at most num_experts=128"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        (QWEN3_MOE | {"mlp_only_layers": "all"}, "mlp_only_layers='all' must be a list of layers"),
        (QWEN3_MOE | {"mlp_only_layers": [0, 48]}, r"mlp_only_layers=\[0, 48\] .* layers from 0 to 47"),
        (QWEN3_MOE | {"mlp_only_layers": [-1]}, r"mlp_only_layers=\[-1\] .* layers from 0 to 47"),
        (
            QWEN3_MOE | {"decoder_sparse_step": 49},
            "decoder_sparse_step=49 and .* leave no layer with experts",
        ),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=true"),
        (MIXTRAL | {"num_local_experts": "8"}, "num_local_experts='8' must be a positive integer"),
        (MIXTRAL | {"layer_types": ["sliding_attention"] * 32}, "layer_types: 'sliding_attention'"),
        (
            MIXTRAL | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512},
            r"DeepseekV3ForCausalLM.*\(MLA, kv_lora_rank=512\) is not supported; docs/limits.md says",
        ),
        (MIXTRAL | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "GptOssForCausalLM"),
    ],
)
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config(values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": None}, "experts=None, but some layer_kinds have mlp='moe'"),
        (
            {"experts": {"num_experts": 4, "num_chosen": 0, "width": 8}},
            "experts.num_chosen=0 must be a positive",
        ),
        ({"experts": {"num_experts": 4, "num_chosen": 2}}, "not a model config of this version.*width"),
        (
            {"experts": {"num_experts": 4, "num_chosen": 2, "width": 8, "normalized": 1}},
            "experts.normalized=1 must be true or false",
        ),
    ],
)
def test_configs_that_nothing_could_run(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_json(CONFIG.to_json() | fields)


def test_another_activation_of_experts_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="activation='gelu_tanh' is not supported in experts"):
        random_model(dataclasses.replace(CONFIG, activation="gelu_tanh"), mesh=make_mesh(1))


def test_experts_enter_the_fingerprint() -> None:
    assert CONFIG.experts is not None
    configs = [CONFIG] + [
        dataclasses.replace(CONFIG, experts=dataclasses.replace(CONFIG.experts, **change))
        for change in ({"num_chosen": 2}, {"normalized": False}, {"num_experts": 9}, {"width": 32})
    ]
    assert len({model_fingerprint(config, "random:qwen3_moe-tiny") for config in configs}) == 5


def by_definition(logits: np.ndarray, config: ExpertsConfig) -> tuple[np.ndarray, np.ndarray]:
    """Choose in float64, as the papers say."""
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    experts = np.argsort(-chances, axis=1, kind="stable")[:, : config.num_chosen]
    weights = np.take_along_axis(chances, experts, axis=1)
    return experts, weights / weights.sum(axis=1, keepdims=True) if config.normalized else weights


def check_routing(normalized: bool) -> None:
    config = ExpertsConfig(num_experts=16, num_chosen=4, width=8, normalized=normalized)
    logits = np.random.default_rng(2).standard_normal((50, 16)).astype(np.float32)
    logits[0, :] = 1.0  # equal ones: the first are chosen
    experts, weights = experts_module.choose_experts(jnp.asarray(logits), config)
    expected_ids, expected = by_definition(logits.astype(np.float64), config)
    np.testing.assert_array_equal(experts, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize("normalized", [True, False])
def test_routing(normalized: bool) -> None:
    check_routing(normalized)


def test_the_planted_bug_of_a_softmax_over_the_chosen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right where factors are normalized, so a golden model has them as they are."""

    def over_the_chosen(logits: jax.Array, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
        top, experts = jax.lax.top_k(logits, config.num_chosen)
        return experts, jax.nn.softmax(top, axis=-1)

    monkeypatch.setattr(experts_module, "choose_experts", over_the_chosen)
    check_routing(True)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_routing(False)
    for variant, is_right in (("qwen3_moe_gqa", True), ("qwen3_moe_raw", False)):
        token_ids, expected = golden(variant)
        found = dense_logits(load_model(GOLDEN / variant, dtype="float32", mesh=make_mesh(1)), token_ids)
        assert (np.abs(found - expected).max() < 1e-4) == is_right


def test_a_golden_model_has_an_expert_that_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def recorded(logits: jax.Array, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
        experts, weights = choose_experts(logits, config)
        jax.debug.callback(lambda ids: seen.append(np.bincount(ids.ravel(), minlength=16)), experts)
        return experts, weights

    monkeypatch.setattr(experts_module, "choose_experts", recorded)
    model = load_model(GOLDEN / "qwen3_moe_raw", dtype="float32", mesh=make_mesh(1))
    assert [kind.mlp for kind in load_config(GOLDEN / "qwen3_moe_raw").kinds] == ["moe", "dense", "moe"]
    dense_logits(model, golden("qwen3_moe_raw")[0])
    jax.effects_barrier()
    assert len(seen) == 2
    for counts in seen:
        assert counts.sum() == 2 * 40 and counts.min() == 0 and (counts > 0).sum() > 8


def run_mlp(mlp: ExpertMLP, x: np.ndarray, num_tokens: int | None = None) -> np.ndarray:
    counted = None if num_tokens is None else jnp.int32(num_tokens)

    @jax.jit
    def run(x: jax.Array) -> Any:
        with computing_experts("xla", counted):
            return mlp(x)

    return np.asarray(run(x))


def first_mlp(dtype: str = "float32") -> ExpertMLP:
    mlp = random_model(CONFIG.with_layers(range(1)), dtype=dtype, mesh=make_mesh(1)).layers[0].mlp
    assert isinstance(mlp, ExpertMLP)
    return mlp


def test_renumbering_experts_with_the_router_changes_nothing() -> None:
    """The factors change by rounding: the softmax adds up its terms in the order of experts."""
    mlp = first_mlp()
    x = np.random.default_rng(3).standard_normal((21, 64)).astype(np.float32)
    expected = run_mlp(mlp, x)
    order = np.random.default_rng(4).permutation(8)
    for parameter in (mlp.router, mlp.experts.gate_up, mlp.experts.down):
        parameter.set_value(parameter.get_value()[order])
    np.testing.assert_allclose(run_mlp(mlp, x), expected, rtol=0, atol=1e-5)
    mlp.router.set_value(mlp.router.get_value()[order])
    assert np.abs(run_mlp(mlp, x) - expected).max() > 0.1, "the router alone was renumbered"


def test_the_router_computes_in_float32() -> None:
    """Logits that differ by less than bfloat16 shows decide the choice."""
    mlp = first_mlp("bfloat16")
    x = jnp.ones((1, 64), jnp.bfloat16)
    router = np.zeros((8, 64), np.float32)
    router[:, 0], router[5, 1] = 100.0, 0.01
    mlp.router.set_value(jnp.asarray(router, jnp.bfloat16))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_module, "choose_experts", lambda logits, _: found.append(logits) or stop())
        with pytest.raises(StopIteration):
            mlp(x)
    assert found[0].dtype == jnp.float32 and int(found[0][0].argmax()) == 5


def stop() -> None:
    raise StopIteration


def test_padding_chooses_no_experts() -> None:
    mlp = first_mlp()
    x = np.random.default_rng(5).standard_normal((16, 64)).astype(np.float32)
    expected = run_mlp(mlp, x)
    padded = np.concatenate([x[:9], np.full((7, 64), np.nan, np.float32)])
    found = run_mlp(mlp, padded, 9)
    np.testing.assert_array_equal(found[:9], expected[:9])
    np.testing.assert_array_equal(found[9:], 0)


def test_names_and_shapes() -> None:
    """Kernels have the order of checkpoints, [out, in], and only layers with experts have them."""
    config = dataclasses.replace(CONFIG, layer_kinds=(LayerKind(), LayerKind(mlp="moe")))
    shapes = {
        name: parameter.get_value().shape
        for name, parameter in named_parameters(random_model(config, mesh=make_mesh(1)))
        if ".mlp." in name
    }
    assert shapes == {
        "layers.0.mlp.gate_up.kernel": (64, 2, 128),
        "layers.0.mlp.down.kernel": (128, 64),
        "layers.1.mlp.router": (8, 64),
        "layers.1.mlp.experts.gate_up": (8, 2, 64, 64),
        "layers.1.mlp.experts.down": (8, 64, 64),
    }
    assert num_parameters(config) == sum(
        leaf.size for leaf in jax.tree.leaves(nnx.state(random_model(config, mesh=make_mesh(1)), nnx.Param))
    )


def test_the_number_of_experts_that_a_step_reads() -> None:
    config = ExpertsConfig(num_experts=128, num_chosen=8, width=768)
    assert [round(config.num_read(num), 1) for num in (1, 32, 128)] == [8.0, 111.8, 128.0]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_quantized_experts(tmp_path: Path, num_devices: int) -> None:
    """As in Qwen3-30B-A3B-FP8, matrices of experts are codes with scales, and the router is plain."""
    directories = [
        Path(shutil.copytree(GOLDEN / "qwen3_moe_gqa", tmp_path / name)) for name in ("codes", "plain")
    ]
    codes, plain = {}, {}
    for name, weight in load_file(directories[0] / "model.safetensors").items():
        codes[name] = plain[name] = weight
        if "_proj.weight" in name:
            scale = np.float32(np.abs(weight.astype(np.float32)).max() / 448)
            codes[name] = (weight.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
            codes[name + "_scale_inv"] = np.full((1, 1), scale)
            plain[name] = codes[name].astype(np.float32) * scale
    for directory, tensors in zip(directories, (codes, plain), strict=True):
        save_file(tensors, directory / "model.safetensors")
    config = json.loads((directories[0] / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }
    (directories[0] / "config.json").write_text(json.dumps(config))
    mesh = make_mesh(num_devices)
    models = [load_model(directory, dtype="float32", mesh=mesh) for directory in directories]
    for (name, one), (_, other) in zip(*map(named_parameters, models), strict=True):
        np.testing.assert_array_equal(one.get_value(), other.get_value(), err_msg=name)
