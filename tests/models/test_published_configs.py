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
from tests.models.test_multimodal import MINISTRAL3_8B

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

GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "summary_type": "cls_index",
    "vocab_size": 50257,
}


def gpt2_sizes(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return GPT2 | {"n_layer": layers, "n_embd": hidden, "n_head": heads}


GRANITE = named(
    "granite",
    "GraniteForCausalLM",
    **sizes(40, 4096, 32, 8, 12800),
    attention_bias=False,
    attention_multiplier=0.0078125,
    bos_token_id=0,
    embedding_multiplier=12.0,
    eos_token_id=0,
    logits_scaling=16.0,
    max_position_embeddings=131072,
    mlp_bias=False,
    residual_multiplier=0.22,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=10000000.0,
    vocab_size=49159,
) | {"tie_word_embeddings": True}
GRANITE_2B = (
    GRANITE | sizes(40, 2048, 32, 8, 8192) | {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
)

MINISTRAL3 = named("ministral3", "Ministral3ForCausalLM") | MINISTRAL3_8B["text_config"]


def growing(**options: Any) -> dict[str, Any]:
    return MINISTRAL3 | {"rope_parameters": MINISTRAL3["rope_parameters"] | options}


SEED_OSS = named(
    "seed_oss",
    "SeedOssForCausalLM",
    **sizes(64, 5120, 80, 8, 27648),
    attention_bias=True,
    attention_out_bias=False,
    bos_token_id=0,
    eos_token_id=2,
    head_dim=128,
    max_position_embeddings=524288,
    mlp_bias=False,
    rms_norm_eps=1e-6,
    rope_scaling={"rope_type": "default"},
    rope_theta=10000000.0,
    vocab_size=155136,
)

PUBLISHED: dict[str, tuple[dict[str, Any], float, dict[str, Any]]] = {
    "OLMo-2-0425-1B": (OLMO2 | sizes(16, 2048, 16, 16, 8192), 1.485, {"head_dim": 128}),
    "OLMo-2-1124-7B": (OLMO2, 7.299, {"head_dim": 128, "group_size": 1}),
    "OLMo-2-1124-13B": (OLMO2 | sizes(40, 5120, 40, 40, 13824), 13.716, {"head_dim": 128}),
    "OLMo-2-0325-32B": (OLMO2 | sizes(64, 5120, 40, 8, 27648), 32.234, {"group_size": 5}),
    "Seed-OSS-36B": (SEED_OSS, 36.151, {"attention_bias": True, "group_size": 10, "head_dim": 128}),
    "distilgpt2": (gpt2_sizes(6, 768, 12), 0.08191, {"dtype": "float32"}),
    "gpt2": (GPT2, 0.12444, {"head_dim": 64, "intermediate_size": 3072, "activation": "gelu_tanh"}),
    "gpt2-medium": (gpt2_sizes(24, 1024, 16), 0.35482, {"head_dim": 64}),
    "gpt2-large": (gpt2_sizes(36, 1280, 20), 0.77403, {"head_dim": 64}),
    "gpt2-xl": (gpt2_sizes(48, 1600, 25), 1.55761, {"head_dim": 64}),
    "granite-3.0-2b": (
        GRANITE_2B | {"max_position_embeddings": 4096, "rope_theta": 10000.0, "vocab_size": 49155},
        2.534,
        {"head_dim": 64, "attention_scale": 0.015625, "logit_scale": 0.125},
    ),
    "granite-3.1-8b": (GRANITE | {"vocab_size": 49155}, 8.171, {"attention_scale": 0.0078125}),
    "granite-3.3-2b": (GRANITE_2B, 2.534, {"head_dim": 64, "embedding_scale": 12 / 0.22}),
    "granite-3.3-8b": (GRANITE, 8.171, {"logit_scale": 1 / 16, "norm_eps": 1e-5 / 0.22**2}),
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

PRESETS = {
    "olmo2-7b": "OLMo-2-1124-7B",
    "phi4": "Phi-4",
    "gpt2": "gpt2",
    "gpt2-large": "gpt2-large",
    "granite-8b": "granite-3.3-8b",
    "seed-oss-36b": "Seed-OSS-36B",
}


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


def test_options_and_defaults_of_ministral3() -> None:
    """Its text half and the model alone have the same options, which test_multimodal.py reads, too."""
    assert parse_hf_config(MINISTRAL3) == preset("ministral3-8b")
    lacking = (
        "rope_parameters",
        "max_position_embeddings",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
    )
    assert parse_hf_config(without(MINISTRAL3, *lacking)) == preset("ministral3-8b")
    assert parse_hf_config(hf_config(preset("ministral3-8b"))) == preset("ministral3-8b")
    assert parse_hf_config(growing(llama_4_scaling_beta=0.3)).ropes[0].query_growth == 0.3
    assert parse_hf_config(MINISTRAL3 | {"sliding_window": 99}).windows == (99,)
    prints = {model_fingerprint(parse_hf_config(growing(llama_4_scaling_beta=x)), "random:x") for x in (1, 2)}
    assert len(prints) == 2


def test_options_and_defaults_of_seed_oss() -> None:
    optional = (
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        "head_dim",
        "bos_token_id",
        "eos_token_id",
    )
    optional += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    assert parse_hf_config(without(SEED_OSS, *optional)) == preset("seed-oss-36b")
    biases = {"attention_bias": False, "mlp_bias": True}
    assert parse_hf_config(SEED_OSS | biases) == preset("seed-oss-36b", **biases)


def test_options_and_defaults_of_granite() -> None:
    """Without multipliers it is a Llama whose scores are not scaled."""
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    config = parse_hf_config(without(GRANITE, *names, "rms_norm_eps"))
    assert (config.embedding_scale, config.attention_scale, config.logit_scale) == (1.0, 1.0, 1.0)
    assert config.norm_eps == 1e-6
    biases = {"attention_bias": True, "mlp_bias": True}
    assert parse_hf_config(GRANITE | biases) == dataclasses.replace(parse_hf_config(GRANITE), **biases)
    prints = {model_fingerprint(parse_hf_config(GRANITE | {name: 0.5}), "random:x") for name in names}
    assert len(prints) == 4


def test_options_and_defaults_of_gpt2() -> None:
    required = ("architectures", "vocab_size", "n_embd", "n_layer", "n_head")
    assert parse_hf_config({name: GPT2[name] for name in required}) == parse_hf_config(GPT2)
    options = {"n_inner": 5, "activation_function": "gelu", "tie_word_embeddings": False}
    expected = {"intermediate_size": 5, "activation": "gelu", "tie_word_embeddings": False}
    assert parse_hf_config(GPT2 | options) == dataclasses.replace(parse_hf_config(GPT2), **expected)
    more = GPT2 | {"n_positions": 2048, "layer_norm_epsilon": 1e-6, "n_inner": None}
    config = parse_hf_config(more | {"reorder_and_upcast_attn": True})
    shorter = parse_hf_config(without(GPT2, "n_positions") | {"max_position_embeddings": 512})
    assert shorter.max_position_embeddings == 512
    assert (config.max_position_embeddings, config.norm_eps, config.intermediate_size) == (2048, 1e-6, 3072)


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
    (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supp"),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights=False is not supported; True is"),
    (GPT2 | {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
    (GPT2 | {"n_embd": 770}, "n_embd=770 is not a multiple of n_head=12"),
    (GPT2 | {"n_embd": "768"}, "n_embd='768' must be a positive integer"),
    (GPT2 | {"hidden_size": 769}, "n_embd=768 differs from hidden_size=769, another name of the same option"),
    (
        GPT2 | {"n_positions": 1024, "max_position_embeddings": 512},
        "n_positions=1024 differs from max_position_embeddings=512",
    ),
    (without(GPT2, "n_layer"), "n_layer=None must be a positive integer"),
    (GPT2 | {"activation_function": "silu"}, "activation_function='silu' is not supported"),
    (GPT2 | {"architectures": ["GPT2DoubleHeadsModel"]}, "GPT2DoubleHeadsModel"),
    (GRANITE | {"residual_multiplier": 0}, "residual_multiplier=0 must be a finite number above 0"),
    (GRANITE | {"residual_multiplier": 1e-170}, "residual_multiplier=1e-170 must be from 1e-09 to 1e\\+09"),
    (GRANITE | {"residual_multiplier": 1e200}, "residual_multiplier=1e\\+200 must be from 1e-09 to 1e\\+09"),
    (GRANITE | {"logits_scaling": 1e-320}, "logits_scaling=1e-320 must be from 1e-09 to 1e\\+09"),
    (GRANITE | {"attention_multiplier": -1.0}, "attention_multiplier=-1.0 must be a finite number above 0"),
    (GRANITE | {"logits_scaling": "8"}, "logits_scaling='8' must be a finite number above 0"),
    (GRANITE | {"embedding_multiplier": True}, "embedding_multiplier=True must be a finite number"),
    (GRANITE | {"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 must be a finite number"),
    (GRANITE | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (GRANITE | {"layer_types": ["mamba"]}, "layer_types: 'mamba' is not supported"),
    (GRANITE | {"architectures": ["GraniteMoeForCausalLM"]}, "GraniteMoeForCausalLM"),
    (growing(llama_4_scaling_beta=None), "rope llama_4_scaling_beta=None must be a finite number above 0"),
    (growing(llama_4_scaling_beta=-0.1), "rope llama_4_scaling_beta=-0.1 must be a finite number above 0"),
    (growing(rope_type="default"), "rope_type='default' is not supported in this family; 'yarn' is"),
    (growing(rope_type="dynamic"), "rope_type='dynamic' is not supported"),
    (
        without(MINISTRAL3, "rope_parameters") | {"rope_theta": 7.0},
        "rope_theta=7.0 is not supported without rope_parameters",
    ),
    (MINISTRAL3 | {"rope_parameters": {}}, "rope_type='default' is not supported in this family"),
    (MINISTRAL3 | {"layer_types": ["sliding_attention"]}, "layer_types: 'sliding_attention'"),
    (SEED_OSS | {"attention_out_bias": True}, "attention_out_bias=True is not supported; False is"),
    (SEED_OSS | {"attention_out_bias": "no"}, "attention_out_bias='no' must be true or false"),
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
