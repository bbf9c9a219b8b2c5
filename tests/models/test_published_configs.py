"""config.json of published models, by hand: sizes, options that count, and numbers of parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from model_defs import ModelConfig, UnsupportedModelError, num_parameters, preset
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

PUBLISHED: dict[str, tuple[dict[str, Any], float, dict[str, Any]]] = {
    "OLMo-2-0425-1B": (OLMO2 | sizes(16, 2048, 16, 16, 8192), 1.485, {"head_dim": 128}),
    "OLMo-2-1124-7B": (OLMO2, 7.299, {"head_dim": 128, "group_size": 1}),
    "OLMo-2-1124-13B": (OLMO2 | sizes(40, 5120, 40, 40, 13824), 13.716, {"head_dim": 128}),
    "OLMo-2-0325-32B": (OLMO2 | sizes(64, 5120, 40, 8, 27648), 32.234, {"group_size": 5}),
}
"""Values of the file, billions of parameters, and what is expected of the config."""

PRESETS = {"olmo2-7b": "OLMo-2-1124-7B"}


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


REFUSED = [
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
