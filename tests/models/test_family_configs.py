"""config.json of Qwen2, Qwen3 and Mistral, as published and as refused; and of every preset, read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from model_defs import (
    PRESETS,
    LayerKind,
    RopeConfig,
    UnsupportedModelError,
    abstract_model,
    load_config,
    make_mesh,
    preset,
    source_config,
)
from model_defs.hf_config import hf_config, parse_hf_config
from model_defs.registry import FAMILIES
from tests.models.helpers import GOLDEN, VARIANTS
from tests.models.test_hf_config import LLAMA, without

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
QWEN3: dict[str, Any] = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "vocab_size": 151936,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}


SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
"""Options of a Qwen model whose layers from 20 on have a window."""


def in_transformers_5(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config as version 5 writes it."""
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    own = {} if values is MISTRAL else {"layer_types": ["full_attention"] * values["num_hidden_layers"]}
    return without(values, "rope_theta", "torch_dtype") | {
        "rope_parameters": rope,
        "dtype": values["torch_dtype"],
        "sliding_window": None,
        **own,
    }


@pytest.mark.parametrize(
    ("values", "name"), [(QWEN2, "qwen2.5-7b"), (QWEN3, "qwen3-8b"), (MISTRAL, "mistral-7b")]
)
def test_published_configs_are_the_presets(values: dict[str, Any], name: str) -> None:
    assert parse_hf_config(values) == preset(name)
    assert parse_hf_config(in_transformers_5(values)) == preset(name)
    assert parse_hf_config(without(values, "architectures")) == preset(name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_variants_are_of_the_family_in_their_name(variant: str) -> None:
    assert variant.rstrip("3").startswith(load_config(GOLDEN / variant).architecture)


def test_every_family_has_a_golden_variant_and_a_tiny_preset() -> None:
    assert {load_config(GOLDEN / variant).architecture for variant in VARIANTS} == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert f"{name}-tiny" in family.presets
        assert {config.architecture for config in family.presets.values()} == {name}


def test_options_that_count() -> None:
    assert parse_hf_config(QWEN2 | {"tie_word_embeddings": True}).tie_word_embeddings
    assert parse_hf_config(QWEN2).attention_bias
    assert parse_hf_config(QWEN2 | {"head_dim": 64}).head_dim == 64
    assert parse_hf_config(QWEN3 | {"attention_bias": True}).attention_bias
    assert parse_hf_config(QWEN3 | {"head_dim": 64}).head_dim == 64
    assert parse_hf_config(MISTRAL | {"head_dim": 160}).head_dim == 160
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (rope,) = parse_hf_config(QWEN3 | {"rope_scaling": yarn}).ropes
    assert rope.attention_factor == pytest.approx(1.1386294)
    assert rope == RopeConfig("yarn", 1e6, 4.0, 32768, attention_factor=rope.attention_factor)


def test_options_that_transformers_does_not_read_either() -> None:
    assert parse_hf_config(LLAMA | {"sliding_window": 4096}) == preset("llama3-8b")
    assert parse_hf_config(QWEN2 | {"attention_bias": False}) == preset("qwen2.5-7b")
    assert parse_hf_config(MISTRAL | {"attention_bias": True}) == preset("mistral-7b")


def test_missing_fields_have_the_defaults_of_transformers() -> None:
    """They differ by family: a missing key differs from a null one."""
    lacking = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "rms_norm_eps")
    config = parse_hf_config(without(QWEN3, *lacking) | {"num_attention_heads": 64})
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (32, 128, 32768)
    assert (config.ropes[0].theta, config.norm_eps) == (10000.0, 1e-6)
    config = parse_hf_config(without(QWEN2, *lacking) | {"num_attention_heads": 64})
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (32, 56, 32768)
    config = parse_hf_config(without(MISTRAL, *lacking))
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (8, 128, 131072)
    for values in (QWEN2, QWEN3, MISTRAL):
        alike = parse_hf_config(values | {"num_key_value_heads": None})
        assert alike.num_kv_heads == alike.num_heads


def test_special_tokens() -> None:
    """Qwen has none unless it says so; ending ids may be in either file."""
    bare = without(QWEN2, "bos_token_id", "eos_token_id")
    config = parse_hf_config(bare, {"eos_token_id": [151645, 151643]})
    assert (config.bos_token_id, config.eos_token_ids) == (None, (151645, 151643))
    assert parse_hf_config(QWEN3 | {"bos_token_id": None}).bos_token_id is None
    assert parse_hf_config(bare).eos_token_ids == ()
    config = parse_hf_config(without(MISTRAL, "bos_token_id", "eos_token_id"))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            QWEN3 | {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"]},
            "layer_types has 1 entries; it must have num_hidden_layers=36",
        ),
        (
            QWEN3 | SOME_WINDOWS | {"sliding_window": None, "layer_types": ["sliding_attention"] * 36},
            "sliding_window=None must be a positive integer",
        ),
        (
            QWEN3 | {"use_sliding_window": True, "layer_types": ["chunked_attention"]},
            "layer_types: 'chunked_attention'",
        ),
        (QWEN2 | SOME_WINDOWS | {"max_window_layers": -1}, "max_window_layers=-1 must be an integer of at l"),
        (QWEN2 | SOME_WINDOWS | {"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
        (QWEN2 | {"use_sliding_window": "no"}, "use_sliding_window='no' must be true or false"),
        (
            QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: 'sliding_attention'",
        ),
        (QWEN3 | {"layer_types": ["sliding_attention"]}, "layer_types: 'sliding_attention'"),
        (LLAMA | {"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window=true"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "layer_types: 'sliding_attention'"),
        (QWEN3 | {"layer_types": 36}, "layer_types=36 must be a list"),
        (MISTRAL | {"layer_types": ["chunked_attention"]}, "layer_types: 'chunked_attention'"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
        (QWEN2 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type='mrope'"),
        (QWEN2 | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (QWEN3 | {"head_dim": 127}, "head_dim=127 must be even"),
        (QWEN3 | {"attention_bias": 1}, "attention_bias=1 must be true or false"),
        (QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        (QWEN3 | {"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
        (MISTRAL | {"head_dim": "128"}, "head_dim='128' must be a positive integer"),
        (MISTRAL | {"head_dim": 0}, "head_dim=0 must be a positive integer"),
        (QWEN3 | {"head_dim": False}, "head_dim=False must be a positive integer"),
    ],
)
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config(values)


@pytest.mark.parametrize(
    "options",
    [
        {"max_window_layers": 28, "sliding_window": 4096},
        {"sliding_window": None, "max_window_layers": 0},
        {"sliding_window": 16, "layer_types": ["full_attention"] * 28, "max_window_layers": 0},
    ],
)
def test_a_window_that_no_layer_has_is_none(options: dict[str, Any]) -> None:
    assert parse_hf_config(QWEN2 | {"use_sliding_window": True} | options) == preset("qwen2.5-7b")


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        (MISTRAL | {"sliding_window": 4096}, range(32)),
        (without(MISTRAL, "sliding_window"), range(32)),
        (QWEN2 | SOME_WINDOWS, range(20, 28)),
        (without(QWEN3 | SOME_WINDOWS, "sliding_window"), range(20, 36)),
        (
            QWEN3 | SOME_WINDOWS | {"layer_types": ["full_attention", "sliding_attention"] * 18},
            range(1, 36, 2),
        ),
    ],
)
def test_windows_are_read_and_written(tmp_path: Path, values: dict[str, Any], layers: range) -> None:
    """Mistral-7B-v0.1 and Zephyr have a window of 4,096 and a context of 32,768."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    for read in (load_config, source_config):
        config = read(tmp_path)
        windows = [kind.window for kind in config.layer_kinds]
        assert windows == [4096 if index in layers else None for index in range(config.num_layers)]
        assert config.kinds == config.layer_kinds and set(windows) == set(config.windows)
        assert read(tmp_path, 4097).kinds == config.kinds
        covered = read(tmp_path, 4096)
        assert covered.layer_kinds == config.layer_kinds
        assert covered.kinds == (LayerKind(),) * config.num_layers and covered.windows == (None,)
        assert parse_hf_config(hf_config(config)) == config


def test_a_shorter_context_leaves_the_frequencies(tmp_path: Path) -> None:
    """YaRN's factor may follow from the context of the file, which is not the served one."""
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(
        json.dumps(MISTRAL | {"rope_scaling": yarn, "sliding_window": 4096})
    )
    assert load_config(tmp_path, 4096).ropes[0].factor == 4.0


def test_a_window_as_long_as_the_context_hides_nothing() -> None:
    config = load_config(GOLDEN / "mistral_window")
    assert {kind.window for kind in config.layer_kinds} == {48} and config.windows == (None,)
    assert config.with_context(49).windows == (48,)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"opt-tiny"}))
def test_a_written_config_is_read_back(name: str) -> None:
    ours = {"initializer_range": 0.02, "initial_norm_scale": 1.0}  # of random weights
    assert parse_hf_config(hf_config(preset(name))) == preset(name, **ours)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_of_a_golden_variant_is_read_back(variant: str) -> None:
    config = load_config(GOLDEN / variant)
    assert parse_hf_config(hf_config(config)) == config


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig("linear", 5e5, 2.0),
        RopeConfig("llama3", 5e5, 8.0, 8192, low_freq_factor=1.5, high_freq_factor=3.0),
        RopeConfig("yarn", 1e6, 4.0, 4096, beta_fast=16.0, beta_slow=2.0, attention_factor=0.7),
        RopeConfig("yarn", 1e6, 4.0, 4096, truncate=False),
    ],
)
@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-8b"])
def test_rotary_positions_of_every_kind_are_written(name: str, rope: RopeConfig) -> None:
    written = hf_config(preset(name, ropes=(rope,)))
    assert parse_hf_config(written) == preset(name, ropes=(rope,))
    assert written["rope_theta"] == rope.theta and written["rope_scaling"]["rope_type"] == rope.kind
    assert ("truncate" in written["rope_scaling"]) == (not rope.truncate)


@pytest.mark.parametrize(
    ("activation", "written"), [("relu", "relu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_new")]
)
def test_activations_are_written_by_their_names(activation: str, written: str) -> None:
    config = preset("opt-125m", activation=activation)
    assert hf_config(config)["activation_function"] == written
    assert parse_hf_config(hf_config(config)).activation == activation


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("opt-tiny", {}, "head_dim=32 cannot be written to a config.json of OPTForCausalLM"),
        (
            "llama3-8b",
            {"ropes": (RopeConfig("linear", 5e5, 2.0, 4096),)},
            r"ropes=\(RopeConfig\(kind='linear'",
        ),
        ("opt-125m", {"activation": "silu"}, "activation_function='silu' is not supported"),
        (
            "qwen3-8b",
            {"mlp_bias": True},
            "mlp_bias=True cannot be written to a config.json of Qwen3ForCausalLM",
        ),
    ],
)
def test_an_option_that_a_config_file_cannot_express_is_refused(
    name: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        hf_config(preset(name, **overrides))


def test_an_unknown_family_is_refused() -> None:
    config = preset("llama-tiny", architecture="gpt_neo")
    with pytest.raises(UnsupportedModelError, match="architecture='gpt_neo' is not one of opt, "):
        abstract_model(config, dtype="auto", mesh=make_mesh(1))
