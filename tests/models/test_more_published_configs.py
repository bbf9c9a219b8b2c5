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
COHERE2 = named(
    "cohere2",
    "Cohere2ForCausalLM",
    **sizes(32, 4096, 32, 8, 14336),
    attention_bias=False,
    bos_token_id=5,
    cache_implementation="hybrid",
    eos_token_id=255001,
    head_dim=128,
    layer_norm_eps=1e-5,
    layer_switch=4,
    logit_scale=0.25,
    max_position_embeddings=132096,
    order_of_interleaved_layers="local_attn_first",
    pad_token_id=0,
    position_embedding_type="rope_gptj",
    rope_scaling=None,
    rope_theta=50000,
    rotary_pct=1.0,
    sliding_window=4096,
    sliding_window_pattern=4,
    use_embedding_sharing=True,
    use_gated_activation=True,
    use_parallel_block=True,
    use_qk_norm=False,
    vocab_size=256000,
)
del COHERE2["tie_word_embeddings"]
GEMMA2 = named(
    "gemma2",
    "Gemma2ForCausalLM",
    **sizes(42, 3584, 16, 8, 14336),
    attention_bias=False,
    attn_logit_softcapping=50.0,
    bos_token_id=2,
    cache_implementation="hybrid",
    eos_token_id=1,
    final_logit_softcapping=30.0,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=8192,
    pad_token_id=0,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    sliding_window=4096,
    sliding_window_size=4096,
    vocab_size=256000,
)
GEMMA2["hidden_act"] = "gelu_pytorch_tanh"
del GEMMA2["tie_word_embeddings"]
GEMMA3_1B = named(
    "gemma3_text",
    "Gemma3ForCausalLM",
    **sizes(26, 1152, 4, 1, 6912),
    attention_bias=False,
    attn_logit_softcapping=None,
    bos_token_id=2,
    cache_implementation="hybrid",
    eos_token_id=[1, 106],
    final_logit_softcapping=None,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=32768,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=512,
    sliding_window_pattern=6,
    vocab_size=262144,
)
del GEMMA3_1B["tie_word_embeddings"], GEMMA3_1B["hidden_act"]


def gemma3(layers: int, hidden: int, wide: int, **text: Any) -> dict[str, Any]:
    """Return the file of a multimodal size, whose text half leaves out what has a default."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": hidden,
            "intermediate_size": wide,
            "model_type": "gemma3_text",
            "num_hidden_layers": layers,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }


GEMMA3_12B = gemma3(48, 3840, 15360, num_attention_heads=16, num_key_value_heads=8)

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
    "c4ai-command-r7b-12-2024": (COHERE2, 8.028, {"windows": (None, 4096), "tie_word_embeddings": True}),
    "c4ai-command-a-03-2025": (
        COHERE2 | sizes(64, 12288, 96, 8, 36864) | {"max_position_embeddings": 131072},
        111.058,
        {"head_dim": 128},
    ),
    "gemma-2-2b": (GEMMA2 | sizes(26, 2304, 8, 4, 9216), 2.614, {"attention_scale": None}),
    "gemma-2-9b": (GEMMA2, 9.242, {"attention_softcap": 50.0, "logit_softcap": 30.0}),
    "gemma-2-27b": (
        GEMMA2 | sizes(46, 4608, 32, 16, 36864) | {"head_dim": 128, "query_pre_attn_scalar": 144},
        27.227,
        {"attention_scale": 144**-0.5, "windows": (None, 4096)},
    ),
    "gemma-3-270m": (
        GEMMA3_1B
        | sizes(18, 640, 4, 1, 2048)
        | {
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
            "_sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
        },
        0.268,
        {"windows": (None, 512)},
    ),
    "gemma-3-1b": (GEMMA3_1B, 1.000, {"windows": (None, 512), "group_size": 4}),
    "gemma-3-4b": (gemma3(34, 2560, 10240), 3.880, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256}),
    "gemma-3-12b": (GEMMA3_12B, 11.766, {"eos_token_ids": (1, 106), "windows": (None, 1024)}),
    "gemma-3-27b": (
        gemma3(
            62,
            5376,
            21504,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            query_pre_attn_scalar=168,
        ),
        27.009,
        {"attention_scale": 168**-0.5},
    ),
}
"""Values of the file, billions of parameters, and what is expected of the config."""

PRESETS = {
    "glm4-9b": "GLM-4-9B-0414",
    "smollm3-3b": "SmolLM3-3B",
    "olmo3-7b": "Olmo-3-1025-7B",
    "command-r7b": "c4ai-command-r7b-12-2024",
    "gemma3-12b": "gemma-3-12b",
    "gemma2-9b": "gemma-2-9b",
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
    (COHERE2, {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}, {}),
    (COHERE2, {"sliding_window_pattern": ..., "sliding_window": ..., "head_dim": ...}, {}),
    (COHERE2, {"logit_scale": ...}, {"logit_scale": 0.0625}),
    (COHERE2, {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
    (
        COHERE2,
        {"sliding_window_pattern": 2},
        {"layer_kinds": (LayerKind(4096), LayerKind(rope=None)) * 16},
    ),
    (GEMMA2, {"attn_logit_softcapping": ..., "final_logit_softcapping": ..., "sliding_window": ...}, {}),
    (
        GEMMA2,
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attention_softcap": None, "logit_softcap": None},
    ),
    (GEMMA2, {"hidden_act": ..., "hidden_activation": ..., "tie_word_embeddings": True}, {}),
    (GEMMA2, {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
    (GEMMA3_1B, {"sliding_window_pattern": ..., "rope_local_base_freq": ..., "rope_theta": ...}, {}),
    (GEMMA3_1B, {"final_logit_softcapping": 30.0}, {"logit_softcap": 30.0}),
    (
        GEMMA3_1B,
        {
            "rope_theta": ...,
            "rope_local_base_freq": ...,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {"ropes": (RopeConfig("linear", 1e6, 8.0), RopeConfig(theta=500.0))},
    ),
    (GEMMA3_12B, {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
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
    (SMOLLM3, {"layer_types": ["full_attention"] * 35}, "layer_types has 35 entries; it must have num_hid"),
    (
        SMOLLM3,
        {"layer_types": ["sliding_attention"] * 36, "use_sliding_window": True},
        "sliding_window=None must be a positive integer",
    ),
    (OLMO3, {"layer_types": ["full_attention"] * 31}, "must be a list of num_hidden_layers=32 entries"),
    (OLMO3, {"layer_types": ["chunked_attention"] * 32}, "layer_types: 'chunked_attention' is not supp"),
    (OLMO3, {"sliding_window": None}, "sliding_window=None must be a positive integer"),
    (OLMO3, {"rope_theta": 1e6}, "rope_theta=1000000.0 is not supported: versions of transformers differ"),
    (OLMO3, {"rope_scaling": None, "rope_theta": 7.0}, "rope_theta=7.0 is not supported"),
    (
        OLMO3,
        {"rope_scaling": None, "rope_theta": 7.0, "rope_parameters": {"full_attention": {}}},
        "rope_theta=7.0 is not supported: versions of transformers differ",
    ),
    (
        OLMO3,
        {"rope_scaling": None, "rope_parameters": {"sliding_attention": {"rope_theta": 2e3}}},
        "rope_theta=500000 is not supported: versions of transformers differ",
    ),
    (
        OLMO3,
        {"rope_scaling": None, "rope_parameters": {"full_attention": {}}, "partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5 is not supported",
    ),
    (
        OLMO3,
        {
            "rope_scaling": None,
            "rope_parameters": {"full_attention": OLMO3["rope_scaling"]},
            "original_max_position_embeddings": 4096,
        },
        "original_max_position_embeddings=4096 differs from 8192 of the rope section full_attention",
    ),
    (OLMO3, {"rope_parameters": {"rope_type": "default"}}, "must have sections full_attention and slid"),
    (OLMO3, {"rope_parameters": {"full_attention": {}}}, "and no rope_scaling besides"),
    (COHERE2, {"head_dim": 64}, "head_dim=64 is not supported: it must be hidden_size=4096 over"),
    (COHERE2, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (COHERE2, {"logit_scale": 0}, "logit_scale=0 must be a finite number above 0"),
    (COHERE2, {"layer_norm_eps": -1}, "layer_norm_eps=-1 must be a finite number above 0"),
    (COHERE2, {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be a positive integer"),
    (COHERE2, {"architectures": ["CohereForCausalLM"]}, "CohereForCausalLM"),
    (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
    (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0 must be a finite number above 0"),
    (GEMMA2, {"final_logit_softcapping": "30"}, "final_logit_softcapping='30' must be a finite number"),
    (GEMMA2, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 must be a finite number above 0"),
    (GEMMA2, {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "GemmaForCausalLM"),
    (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported in Gemma 3"),
    (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
    (GEMMA3_1B, {"rope_local_base_freq": 1}, "rope_local_base_freq=1 must be a finite number above 1"),
    (GEMMA3_1B, {"rope_parameters": {"global": {}}}, "must have sections full_attention and sliding"),
    (GEMMA3_1B, {"model_type": "gemma3n_text"}, "model_type='gemma3n_text'"),
]


@pytest.mark.parametrize(("values", "options", "message"), REFUSED)
def test_refused_by_name(values: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config(values | options)


def test_all_are_different() -> None:
    configs: set[ModelConfig] = {parse_hf_config(values) for values, _, _ in PUBLISHED.values()}
    assert len(configs) == len(PUBLISHED)
