"""config.json in every spelling; what is not implemented is refused by name."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from model_defs import CheckpointError, ModelConfig, RopeConfig, UnsupportedModelError, load_config, preset
from model_defs.hf_config import parse_hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "max_position_embeddings": 2048,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 5120,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def test_published_configs_are_the_presets() -> None:
    assert parse_hf_config(LLAMA) == preset("llama3-8b")
    assert parse_hf_config(OPT) == preset("opt-13b")


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_SCALING},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3_SCALING},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_SCALING},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3"} | LLAMA3_SCALING},
    ],
)
def test_rope_of_transformers_4_and_5(spelling: dict[str, Any]) -> None:
    config = parse_hf_config(without(LLAMA, "rope_theta") | spelling)
    assert config.ropes[0] == RopeConfig("llama3", 5e5, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize("spelling", [{}, {"rope_scaling": None}, {"rope_parameters": None}])
def test_rope_defaults(spelling: dict[str, Any]) -> None:
    assert parse_hf_config(LLAMA | spelling).ropes[0] == RopeConfig(theta=500000.0)
    assert parse_hf_config(without(LLAMA, "rope_theta") | spelling).ropes[0] == RopeConfig(theta=10000.0)


def test_two_sections_for_rope_are_refused_unless_equal() -> None:
    """Adding `rope_scaling` to a file that has `rope_parameters` asks for yarn, which must not be ignored."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    with pytest.raises(
        UnsupportedModelError, match=r"rope_scaling=.*yarn.* with a different rope_parameters=.*def"
    ):
        parse_hf_config(LLAMA | {"rope_parameters": plain, "rope_scaling": scaled})
    both = {"rope_parameters": scaled, "rope_scaling": scaled}
    assert parse_hf_config(LLAMA | both).ropes[0].kind == "yarn"


def yarn(**options: Any) -> RopeConfig:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048} | options
    return parse_hf_config(LLAMA | {"rope_scaling": scaling}).ropes[0]


def test_yarn() -> None:
    assert yarn().attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    assert yarn(attention_factor=0.7).attention_factor == 0.7
    assert yarn(mscale=2.0, mscale_all_dim=1.0).attention_factor == pytest.approx(1.2772589 / 1.1386294)
    assert (yarn().beta_fast, yarn().beta_slow, yarn().truncate) == (32.0, 1.0, True)
    assert (yarn(beta_fast=16).beta_fast, yarn(truncate=False).truncate) == (16.0, False)
    assert (yarn(factor=None).factor, yarn().original_max_positions) == (4.0, 2048)


def test_missing_fields_have_the_usual_defaults() -> None:
    config = parse_hf_config(without(LLAMA, "num_key_value_heads", "head_dim", "rms_norm_eps", "torch_dtype"))
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.dtype) == (32, 128, 1e-6, "float32")
    config = parse_hf_config(LLAMA | {"head_dim": None, "num_key_value_heads": None})
    assert (config.num_kv_heads, config.head_dim) == (32, 128)
    assert parse_hf_config(LLAMA | {"head_dim": 64}).head_dim == 64
    assert parse_hf_config(without(OPT, "word_embed_proj_dim")).embed_width == 5120
    assert parse_hf_config(without(OPT, "architectures")) == preset("opt-13b")


def test_missing_options_of_opt_have_the_defaults_of_transformers() -> None:
    """They are those of `transformers.OPTConfig`; an early config.json of OPT leaves them out."""
    required = {name: OPT[name] for name in ("model_type", "ffn_dim", "hidden_size", "vocab_size")}
    sizes = {"num_attention_heads": 40, "num_hidden_layers": 40}
    config = parse_hf_config(required | sizes)
    assert (config.pre_norm, config.final_norm, config.norm_affine) == (True, True, True)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (True, True, True)
    assert (config.activation, config.embed_width, config.max_position_embeddings) == ("relu", 5120, 2048)
    assert (config.bos_token_id, config.eos_token_ids, config.initializer_range) == (2, (2,), 0.02)


def test_dtype_of_transformers_5() -> None:
    assert parse_hf_config(without(LLAMA, "torch_dtype") | {"dtype": "float16"}).dtype == "float16"
    assert parse_hf_config(LLAMA | {"torch_dtype": "torch.float32"}).dtype == "float32"


@pytest.mark.parametrize(
    ("eos", "generation_eos", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (5, [7, 5, 8], (5, 7, 8)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_ids(eos: Any, generation_eos: Any, expected: tuple[int, ...]) -> None:
    generation = None if generation_eos is None else {"eos_token_id": generation_eos}
    assert parse_hf_config(LLAMA | {"eos_token_id": eos}, generation).eos_token_ids == expected


def test_opt_variants() -> None:
    config = parse_hf_config(
        OPT
        | {
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 512,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        }
    )
    assert (config.pre_norm, config.final_norm, config.embed_width) == (False, False, 512)
    assert (config.attention_bias, config.mlp_bias, config.norm_affine) == (False, False, False)
    assert (config.activation, config.tie_word_embeddings) == ("gelu", True)
    assert not parse_hf_config(OPT | {"_remove_final_layer_norm": True}).final_norm


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (LLAMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "GemmaForCausalLM"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA | {"model_type": "opt"}, "model_type='opt'"),
        (without(LLAMA, "architectures") | {"model_type": "gpt_neo"}, "model_type='gpt_neo'"),
        ({}, "supported: OPTForCausalLM, LlamaForCausalLM"),
        (
            LLAMA | {"architectures": "LlamaForCausalLM"},
            "architectures='LlamaForCausalLM', model_type='llama'",
        ),
        (LLAMA | {"architectures": 0}, "architectures=0, model_type='llama' is not supported"),
        (LLAMA | {"architectures": 3}, "architectures=3, model_type='llama' is not supported"),
        (without(LLAMA, "architectures") | {"model_type": ["llama"]}, r"model_type=\['llama'\] is not"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (OPT | {"activation_function": "swish"}, "activation_function='swish'"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        (LLAMA | {"rope_scaling": {"rope_type": 0}}, "rope_type=0"),
        (LLAMA | {"max_position_embeddings": 10**400}, "max_position_embeddings=1000.* must be at most 2147"),
        (
            LLAMA
            | {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1}}
            | {"max_position_embeddings": 10**400},
            "max_position_embeddings=1000.* must be at most 2147483647",
        ),
        (LLAMA | {"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope factor=None"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": -1}}, "rope factor=-1"),
        (LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope low_freq_factor=None"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "quantized by HQQ are not supported"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        (without(LLAMA, "vocab_size"), "vocab_size=None must be a positive integer"),
        (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers='32'"),
        (LLAMA | {"attention_bias": "yes"}, "attention_bias='yes'"),
        (LLAMA | {"num_key_value_heads": 5}, "num_heads=32 must be a multiple of num_kv_heads=5"),
        (LLAMA | {"hidden_size": 4097}, "hidden_size=4097 is not a multiple of num_attention_heads=32"),
        (LLAMA | {"head_dim": 33}, "head_dim=33 must be even"),
        (OPT | {"hidden_size": 5121}, "hidden_size=5121 is not a multiple"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config(values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rms_norm_eps", [0, -1, math.nan, math.inf, 10**400, "tiny", True, [1e-6]]),
        ("rope_theta", [0, 1, -10000, math.nan, math.inf, "1e4x", False, {}]),
        ("initializer_range", [-0.02, math.nan, "0.02"]),
        ("bos_token_id", ["<s>", [1], -1, 1.0, True]),
        ("rope_scaling", [[1], "linear", 4.0, True]),
        ("rope_parameters", [[1], "linear"]),
        ("hidden_act", [["silu"], [], 0, False, ""]),
        ("torch_dtype", [0, False, ""]),
        ("max_position_embeddings", [2**31]),
    ],
)
def test_values_of_a_wrong_kind_or_size(name: str, values: list[Any]) -> None:
    """They would load and give wrong answers, or raise an error that names no option."""
    for value in values:
        with pytest.raises(UnsupportedModelError, match=re.escape(f"{name}={value!r}")):
            parse_hf_config(LLAMA | {name: value})


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("default", "rope_theta", [0, -1, math.nan, "5e5"]),
        ("yarn", "beta_fast", [0, -3, "32"]),
        ("yarn", "beta_slow", [-1, math.inf, [1]]),
        ("yarn", "mscale", [-1, "1"]),
        ("yarn", "mscale_all_dim", [math.nan]),
        ("yarn", "attention_factor", [0, "1"]),
        ("yarn", "original_max_position_embeddings", ["x", 0, -5, 8192.5, [8192]]),
        ("yarn", "original_max_position_embeddings", [2**31]),
        ("llama3", "original_max_position_embeddings", ["x", True]),
        ("llama3", "low_freq_factor", [4.0, 5.0]),
    ],
)
def test_values_of_the_rope_section_of_a_wrong_kind_or_size(kind: str, name: str, values: list[Any]) -> None:
    section = {"rope_type": kind} | LLAMA3_SCALING
    for value in values:
        with pytest.raises(UnsupportedModelError, match=re.escape(f"{name}={value!r}")):
            parse_hf_config(LLAMA | {"rope_scaling": section | {name: value}})


def test_null_is_the_default_of_a_number() -> None:
    nothing = {"rms_norm_eps": None, "rope_theta": None, "initializer_range": None}
    config = parse_hf_config(LLAMA | nothing)
    assert (config.norm_eps, config.ropes[0].theta, config.initializer_range) == (1e-6, 10000.0, 0.02)
    assert parse_hf_config(OPT | {"init_std": None}).initializer_range == 0.02
    with pytest.raises(UnsupportedModelError, match="init_std='x'"):
        parse_hf_config(OPT | {"init_std": "x"})
    # A null value in the section falls back to the file's; a missing length falls back to the family's.
    assert parse_hf_config(LLAMA | {"rope_parameters": {"rope_theta": None}}).ropes[0].theta == 5e5
    assert yarn(beta_fast=None, beta_slow=None, mscale=0, mscale_all_dim=0) == yarn()
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    bare = without(LLAMA, "max_position_embeddings") | {"rope_scaling": scaling}
    assert parse_hf_config(bare).ropes[0].factor == 2.0


def test_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        load_config(tmp_path)
    for text in ("{", "[" * 100_000, "[" + "1" * 5000 + "]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
            load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, found list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128009]}))
    config = load_config(tmp_path)
    assert config.eos_token_ids == (128001, 128009)
    assert isinstance(config, ModelConfig) and config.group_size == 4
