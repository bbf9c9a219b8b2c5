"""config.json of published models, by hand: sizes, options that count, and numbers of parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from model_defs import (
    LayerKind,
    ModelConfig,
    RopeConfig,
    UnsupportedModelError,
    model_fingerprint,
    num_parameters,
    preset,
)
from model_defs.hf_config import hf_config, parse_hf_config
from tests.models.test_hf_config import without

COMMON: dict[str, Any] = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}


def named(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    return COMMON | {"model_type": model_type, "architectures": [architecture]} | values


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, wide: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": wide,
    }


OLMO2 = named(
    "olmo2",
    "Olmo2ForCausalLM",
    **sizes(32, 4096, 32, 32, 11008),
    attention_bias=False,
    eos_token_id=100257,
    pad_token_id=100277,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=500000,
    vocab_size=100352,
)

PHI4 = named(
    "phi3",
    "Phi3ForCausalLM",
    **sizes(40, 5120, 40, 10, 17920),
    attention_bias=False,
    bos_token_id=100257,
    eos_token_id=100265,
    max_position_embeddings=16384,
    original_max_position_embeddings=16384,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=250000,
    sliding_window=None,
    vocab_size=100352,
)


def longrope(kind: str, num_factors: int) -> dict[str, Any]:
    """Return options of a Phi-3 for a context of 131,072 tokens; the factors stand for the published ones."""
    factors = {"short_factor": [1.0] * num_factors, "long_factor": [1.0 + i for i in range(num_factors)]}
    return {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": kind} | factors,
        "sliding_window": 262144,
    }


PHI3_TOKENS = {"bos_token_id": 1, "eos_token_id": 32000, "vocab_size": 32064}
PHI3_MINI = PHI4 | sizes(32, 3072, 32, 32, 8192) | longrope("longrope", 48) | PHI3_TOKENS
PHI3_MINI_4K = PHI3_MINI | {
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "sliding_window": 2047,
}
PHI4_MINI = (
    PHI4
    | sizes(32, 3072, 24, 8, 8192)
    | longrope("longrope", 48)
    | {
        "bos_token_id": 199999,
        "eos_token_id": 199999,
        "vocab_size": 200064,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
        "lm_head_bias": False,
        "mlp_bias": False,
    }
)

PUBLISHED: dict[str, tuple[dict[str, Any], float, dict[str, Any]]] = {
    "OLMo-2-0425-1B": (OLMO2 | sizes(16, 2048, 16, 16, 8192), 1.485, {"head_dim": 128}),
    "OLMo-2-1124-7B": (OLMO2, 7.299, {"head_dim": 128, "group_size": 1}),
    "OLMo-2-1124-13B": (OLMO2 | sizes(40, 5120, 40, 40, 13824), 13.716, {"head_dim": 128}),
    "OLMo-2-0325-32B": (OLMO2 | sizes(64, 5120, 40, 8, 27648), 32.234, {"group_size": 5}),
    "Phi-3-mini-4k": (PHI3_MINI_4K, 3.821, {"head_dim": 96, "windows": (2047,), "ropes": (RopeConfig(),)}),
    "Phi-3-mini-128k": (
        PHI3_MINI | longrope("su", 48),
        3.821,
        {"layer_kinds": (LayerKind(window=262144),) * 32, "windows": (None,)},
    ),
    "Phi-3-medium-128k": (
        PHI4 | longrope("su", 64) | PHI3_TOKENS | {"sliding_window": 131072},
        13.960,
        {"head_dim": 128, "group_size": 4},
    ),
    "Phi-4": (PHI4, 14.660, {"head_dim": 128, "ropes": (RopeConfig(theta=250000.0),)}),
    "Phi-4-reasoning": (
        PHI4 | {"max_position_embeddings": 32768, "rope_theta": 500000},
        14.660,
        {"ropes": (RopeConfig(theta=500000.0),)},
    ),
    "Phi-4-mini": (PHI4_MINI, 3.836, {"head_dim": 128, "group_size": 3, "eos_token_ids": (199999,)}),
}
"""Values of the file, billions of parameters, and what is expected of the config."""

PRESETS = {"olmo2-7b": "OLMo-2-1124-7B", "phi4": "Phi-4"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    values, billions, expected = PUBLISHED[name]
    config = parse_hf_config(values)
    assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=0.001)
    assert {field: getattr(config, field) for field in expected} == expected
    assert parse_hf_config(hf_config(config)) == config
    assert parse_hf_config(without(values, "architectures")) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_published_models(name: str) -> None:
    assert parse_hf_config(PUBLISHED[PRESETS[name]][0]) == preset(name)


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        (without(OLMO2, "eos_token_id", "rms_norm_eps"), {"eos_token_ids": (50279,), "norm_eps": 1e-5}),
        (without(OLMO2, "num_key_value_heads", "max_position_embeddings"), {"max_position_embeddings": 2048}),
        (OLMO2 | {"attention_bias": True}, {"attention_bias": True}),
        (OLMO2 | {"head_dim": 64}, {"head_dim": 64}),
    ],
)
def test_options_and_defaults(values: dict[str, Any], fields: dict[str, Any]) -> None:
    base = parse_hf_config(OLMO2)
    assert parse_hf_config(values) == dataclasses.replace(base, **fields)


def test_longrope_is_read() -> None:
    """Phi-3.5-mini is Phi-3-mini-128k with other factors and the present name of the kind."""
    (rope,) = parse_hf_config(PHI3_MINI).ropes
    assert parse_hf_config(PHI3_MINI | longrope("su", 48)).ropes == (rope,)
    assert parse_hf_config(PHI3_MINI | longrope("yarn", 48)).ropes == (rope,)
    assert (rope.kind, rope.original_max_positions, rope.rotary_fraction) == ("longrope", 4096, 1.0)
    assert rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    assert (rope.short_factors[-1], rope.long_factors[-1]) == (1.0, 48.0)
    assert parse_hf_config(PHI4_MINI).ropes == (dataclasses.replace(rope, rotary_fraction=0.75),)
    new = PHI3_MINI["rope_scaling"] | {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0}
    new |= {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 4096}
    new |= {name: new[name][:24] for name in ("short_factor", "long_factor")}
    bare = without(PHI3_MINI, "rope_scaling", "rope_theta")
    (rope,) = parse_hf_config(bare | {"rope_parameters": new}).ropes
    assert rope.attention_factor == pytest.approx((1 + 4 / 12) ** 0.5)
    assert (len(rope.long_factors), rope.rotary_fraction) == (24, 0.5)
    bare = parse_hf_config(without(PHI3_MINI, "original_max_position_embeddings"))
    assert bare == parse_hf_config(PHI3_MINI)
    new = PHI3_MINI["rope_scaling"] | {"attention_factor": 1.5}
    assert parse_hf_config(PHI3_MINI | {"rope_scaling": new}).ropes[0].attention_factor == 1.5


def test_the_served_context_chooses_the_factors_of_longrope() -> None:
    config = parse_hf_config(PHI3_MINI)
    (both,) = config.ropes
    long, short = ((), both.long_factors), (both.short_factors, ())
    for context, expected in ((131072, long), (4097, long), (4096, short), (100, short)):
        rope = both.in_context(context)
        assert (rope.short_factors, rope.long_factors) == expected
    served = [model_fingerprint(config.with_context(context), "random:x") for context in (131072, 4097)]
    assert len({*served, model_fingerprint(config.with_context(4096), "random:x")}) == 2
    plain = parse_hf_config(PHI4)
    assert model_fingerprint(plain, "random:x") == model_fingerprint(plain.with_context(9), "random:x")


def scaled(**options: Any) -> dict[str, Any]:
    return PHI3_MINI | {"rope_scaling": PHI3_MINI["rope_scaling"] | options}


REFUSED = [
    (scaled(type="linear", factor=2.0), "rope_type='linear' is not supported in this family; 'default' and"),
    (scaled(type="dynamic"), "rope_type='dynamic' is not supported in this family"),
    (scaled(short_factor=[1.0] * 47), "short_factors has 47 numbers; it must have 48"),
    (scaled(long_factor=[]), "long_factors has 0 numbers; it must have 48"),
    (scaled(long_factor=None), "long_factors=None must be a list of finite numbers above 0"),
    (scaled(long_factor=[0.0] * 48), "long_factors=.* must be a list of finite numbers above 0"),
    (scaled(long_factor="1.0"), "long_factors='1.0' must be a list"),
    (scaled(long_mscale=1.2), "long_mscale=1.2 is not supported"),
    (
        scaled(original_max_position_embeddings=8192),
        "original_max_position_embeddings=4096 differs from 8192",
    ),
    (
        PHI3_MINI | {"original_max_position_embeddings": 1},
        "original_max_position_embeddings=1 must be an int",
    ),
    (PHI4 | {"partial_rotary_factor": 1.5}, "rotary_fraction=1.5 must be at most 1"),
    (PHI4 | {"partial_rotary_factor": 0.04}, "head_dim=128 times rotary_fraction=0.04 must be even"),  # 5
    (PHI4 | {"partial_rotary_factor": "all"}, "partial_rotary_factor='all' must be a finite number"),
    (PHI4 | {"partial_rotary_factor": 0.001}, "head_dim=128 times rotary_fraction=0.001 must be even"),
    (PHI4 | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (PHI4 | {"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
    (PHI4 | {"architectures": ["Phi3SmallForCausalLM"]}, "Phi3SmallForCausalLM"),
    (PHI4 | {"architectures": ["PhiForCausalLM"], "model_type": "phi"}, "PhiForCausalLM"),
    (OLMO2 | {"layer_types": ["sliding_attention"] * 32}, "layer_types: 'sliding_attention'"),
    (OLMO2 | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (OLMO2 | {"attention_bias": "no"}, "attention_bias='no' must be true or false"),
    (OLMO2 | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    (OLMO2 | {"model_type": "olmo"}, "model_type='olmo' is not supported"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config(values)


def test_all_are_different() -> None:
    configs: set[ModelConfig] = {parse_hf_config(values) for values, _, _ in PUBLISHED.values()}
    assert len(configs) == len(PUBLISHED)
