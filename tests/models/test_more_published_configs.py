"""config.json of GLM-4, SmolLM3, OLMo 3, Cohere 2 and Gemma as published, by hand, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from model_defs import (
    LayerKind,
    ModelConfig,
    RopeConfig,
    UnsupportedModelError,
    num_parameters,
    preset,
)
from model_defs.hf_config import hf_config, parse_hf_config
from tests.models.test_hf_config import without
from tests.models.test_published_configs import named, sizes

GLM4 = named(
    "glm4",
    "Glm4ForCausalLM",
    **sizes(40, 4096, 32, 2, 13696),
    attention_bias=False,
    eos_token_id=[151329, 151336, 151338],
    head_dim=128,
    max_position_embeddings=32768,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    vocab_size=151552,
)
SMOLLM3 = named(
    "smollm3",
    "SmolLM3ForCausalLM",
    **sizes(36, 2048, 16, 4, 11008),
    attention_bias=False,
    bos_token_id=128000,
    eos_token_id=128012,
    layer_types=["full_attention"] * 36,
    max_position_embeddings=65536,
    max_window_layers=28,
    mlp_bias=False,
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=5000000.0,
    sliding_window=None,
    use_sliding_window=False,
    vocab_size=128256,
)
del SMOLLM3["tie_word_embeddings"]
OLMO3 = named(
    "olmo3",
    "Olmo3ForCausalLM",
    **sizes(32, 4096, 32, 32, 11008),
    attention_bias=False,
    eos_token_id=100257,
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
    max_position_embeddings=65536,
    pad_token_id=100277,
    rms_norm_eps=1e-6,
    rope_scaling={
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    rope_theta=500000,
    sliding_window=4096,
    vocab_size=100278,
)

PUBLISHED: dict[str, tuple[dict[str, Any], float, dict[str, Any]]] = {
    "GLM-4-9B-0414": (GLM4, 9.400, {"attention_bias": False, "norm_eps": 1e-5}),
    "GLM-4-32B-0414": (GLM4 | sizes(61, 6144, 48, 2, 23040), 32.566, {"head_dim": 128}),
    "SmolLM3-3B": (SMOLLM3, 3.075, {"head_dim": 128, "windows": (None,)}),
    "SmolLM3-3B-Base": (SMOLLM3 | {"eos_token_id": 128001}, 3.075, {"eos_token_ids": (128001,)}),
    "Olmo-3-1025-7B": (OLMO3, 7.298, {"windows": (None, 4096)}),
    "Olmo-3-1125-32B": (
        OLMO3
        | sizes(64, 5120, 40, 8, 27648)
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16},
        32.233,
        {"head_dim": 128},
    ),
}
"""Values of the file, billions of parameters, and what is expected of the config."""

PRESETS = {
    "glm4-9b": "GLM-4-9B-0414",
    "smollm3-3b": "SmolLM3-3B",
    "olmo3-7b": "Olmo-3-1025-7B",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    values, billions, expected = PUBLISHED[name]
    config = parse_hf_config(values)
    assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=0.001)
    assert config.dtype == "bfloat16"
    assert {field: getattr(config, field) for field in expected} == expected
    assert parse_hf_config(hf_config(config)) == config
    assert parse_hf_config(without(values, "architectures")) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_published_models(name: str) -> None:
    assert parse_hf_config(PUBLISHED[PRESETS[name]][0]) == preset(name)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (GLM4, {"attention_bias": ...}, {"attention_bias": True}),
    (GLM4, {"num_key_value_heads": ..., "head_dim": ..., "partial_rotary_factor": ...}, {}),
    (GLM4, {"eos_token_id": None}, {}),
    (GLM4, {"rms_norm_eps": ...}, {"norm_eps": 1.5625e-7}),
    (GLM4, {"partial_rotary_factor": 0.25}, {"ropes": (RopeConfig(rotary_fraction=0.25),)}),
    (
        GLM4,
        {
            "rope_theta": ...,
            "partial_rotary_factor": ...,
            "rope_parameters": {"rope_type": "default", "rope_theta": 7e3, "partial_rotary_factor": 1.0},
        },
        {"ropes": (RopeConfig(theta=7e3),)},
    ),
    (SMOLLM3, {"no_rope_layers": None, "layer_types": None, "tie_word_embeddings": True}, {}),
    (SMOLLM3, {"no_rope_layers": [1] * 40}, {"layer_kinds": ()}),
    (SMOLLM3, {"rope_theta": ...}, {"ropes": (RopeConfig(theta=2e6),)}),
    (
        SMOLLM3,
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": None},
        {"layer_kinds": (LayerKind(), LayerKind(), LayerKind(), LayerKind(64, None)) * 9},
    ),
    (
        SMOLLM3,
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        {"layer_kinds": (LayerKind(64), LayerKind(), LayerKind(64), LayerKind(rope=None)) * 9},
    ),
    (SMOLLM3, {"use_sliding_window": True, "layer_types": None}, {}),
    (OLMO3, {"layer_types": None, "sliding_window": ..., "rope_theta": ...}, {}),
    (
        OLMO3,
        {"rope_scaling": None},
        {
            "ropes": (RopeConfig(theta=5e5),),
            "layer_kinds": (LayerKind(4096), LayerKind(4096), LayerKind(4096), LayerKind()) * 8,
        },
    ),
    (
        OLMO3,
        {
            "rope_scaling": ...,
            "rope_theta": ...,
            "rope_parameters": {
                "full_attention": {**OLMO3["rope_scaling"], "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
        {"ropes": (preset("olmo3-7b").ropes[0], RopeConfig(theta=2e3))},
    ),
]
"""A file, options to change (`...` leaves one out), and the fields of the config that follow."""


@pytest.mark.parametrize(("values", "options", "fields"), OPTIONS)
def test_options_and_defaults(
    values: dict[str, Any], options: dict[str, Any], fields: dict[str, Any]
) -> None:
    left_out = [name for name, value in options.items() if value is ...]
    changed = {name: value for name, value in options.items() if value is not ...}
    config = parse_hf_config(without(values, *left_out) | changed)
    assert config == dataclasses.replace(parse_hf_config(values), **fields)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GLM4, {"partial_rotary_factor": 0.01}, "times rotary_fraction=0.01 must be even"),
    (GLM4, {"partial_rotary_factor": 1.5}, "rotary_fraction=1.5 must be at most 1"),
    (GLM4, {"partial_rotary_factor": "half"}, "partial_rotary_factor='half' must be a finite number"),
    (GLM4, {"layer_types": ["sliding_attention"] * 40}, "layer_types: 'sliding_attention'"),
    (GLM4, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (GLM4, {"model_type": "glm"}, "model_type='glm' is not supported"),
    (GLM4, {"architectures": ["Glm4MoeForCausalLM"]}, "Glm4MoeForCausalLM"),
    (SMOLLM3, {"no_rope_layers": [1] * 35}, "must be a list of num_hidden_layers=36 entries, 0 or 1"),
    (SMOLLM3, {"no_rope_layers": [2] * 36}, "must be a list of num_hidden_layers=36 entries, 0 or 1"),
    (SMOLLM3, {"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval=0 must be"),
    (SMOLLM3, {"layer_types": ["sliding_attention"] * 36}, "layer_types: 'sliding_attention'"),
    (
        SMOLLM3,
        {"layer_types": ["sliding_attention"] * 36, "use_sliding_window": True},
        "sliding_window=None must be a positive integer",
    ),
    (OLMO3, {"layer_types": ["full_attention"] * 31}, "must be a list of num_hidden_layers=32 entries"),
    (OLMO3, {"layer_types": ["chunked_attention"] * 32}, "layer_types: 'chunked_attention' is not supp"),
    (OLMO3, {"sliding_window": None}, "sliding_window=None must be a positive integer"),
    (OLMO3, {"rope_theta": 1e6}, "rope_theta=1000000.0 is not supported: versions of transformers differ"),
    (OLMO3, {"rope_parameters": {"rope_type": "default"}}, "must have sections full_attention and slid"),
    (OLMO3, {"rope_parameters": {"full_attention": {}}}, "and no rope_scaling besides"),
]


@pytest.mark.parametrize(("values", "options", "message"), REFUSED)
def test_refused_by_name(values: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config(values | options)


def test_all_are_different() -> None:
    configs: set[ModelConfig] = {parse_hf_config(values) for values, _, _ in PUBLISHED.values()}
    assert len(configs) == len(PUBLISHED)
