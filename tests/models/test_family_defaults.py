"""Defaults of every family: what a config.json of the required keys alone means, as in transformers 5.24."""

from __future__ import annotations

from typing import Any

import pytest

from model_defs import LayerKind, ModelConfig, RopeConfig
from model_defs.config import ExpertsConfig
from model_defs.hf_config import parse_hf_config
from model_defs.registry import FAMILIES

REQUIRED = {
    "vocab_size": 300000,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
_NAMES: dict[str, dict[str, str]] = {
    "opt": {"intermediate_size": "ffn_dim"},
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
}
"""Names of required keys that differ from those of other families."""


def _by_period(period: int, windowed: LayerKind, last: LayerKind) -> tuple[LayerKind, ...]:
    return tuple(last if (index + 1) % period == 0 else windowed for index in range(8))


_WINDOW, _ALL_EXPERTS = LayerKind(4096), (LayerKind(mlp="moe"),) * 8
_BIASES = {"attention_bias": True, "mlp_bias": True}
_QWEN = {"max_position_embeddings": 32768, "norm_eps": 1e-6}
_GEMMA = {
    "num_kv_heads": 4,
    "head_dim": 256,
    "bos_token_id": 2,
    "eos_token_ids": (1,),
    "tie_word_embeddings": True,
    "activation": "geglu_tanh",
    "norm_eps": 1e-6,
}
_LLAMA = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_ids": (2,), "norm_eps": 1e-6}
_MISTRAL = {"num_kv_heads": 8, "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_ids": (2,)}

DEFAULTS: dict[str, dict[str, Any]] = {
    "opt": {
        "max_position_embeddings": 2048,
        "bos_token_id": 2,
        "eos_token_ids": (2,),
        "tie_word_embeddings": True,
        "activation": "relu",
        **_BIASES,
    },
    "llama": _LLAMA,
    "qwen2": _QWEN | {"attention_bias": True},
    "qwen3": _QWEN | {"head_dim": 128},
    "mistral": _MISTRAL | {"norm_eps": 1e-6, "layer_kinds": (_WINDOW,) * 8},
    "olmo2": {"max_position_embeddings": 2048, "eos_token_ids": (50279,), "norm_eps": 1e-5},
    "phi3": {
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_ids": (32000,),
        "norm_eps": 1e-5,
    },
    "gpt2": {
        "intermediate_size": 1024,
        "max_position_embeddings": 1024,
        "bos_token_id": 50256,
        "eos_token_ids": (50256,),
        "tie_word_embeddings": True,
        "activation": "gelu_tanh",
        "norm_eps": 1e-5,
        **_BIASES,
    },
    "granite": _LLAMA | {"attention_scale": 1.0},
    "ministral3": _MISTRAL
    | {
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "norm_eps": 1e-5,
        "ropes": (RopeConfig("yarn", 1e6, 16.0, 16384, query_growth=0.1),),
    },
    "seed_oss": {
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "bos_token_id": 0,
        "eos_token_ids": (2,),
        "norm_eps": 1e-6,
        "attention_bias": True,
    },
    "glm4": {
        "num_kv_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "eos_token_ids": (151329, 151336, 151338),
        "norm_eps": 1.5625e-7,
        "attention_bias": True,
        "ropes": (RopeConfig(rotary_fraction=0.5),),
    },
    "smollm3": {
        "num_kv_heads": 4,
        "max_position_embeddings": 32768,
        "bos_token_id": 128000,
        "eos_token_ids": (128001,),
        "tie_word_embeddings": True,
        "norm_eps": 1e-6,
        "ropes": (RopeConfig(theta=2e6),),
        "layer_kinds": _by_period(4, LayerKind(), LayerKind(rope=None)),
    },
    "olmo3": {
        "max_position_embeddings": 2048,
        "eos_token_ids": (50279,),
        "norm_eps": 1e-5,
        "ropes": (RopeConfig(theta=5e5),),
        "layer_kinds": _by_period(4, _WINDOW, LayerKind()),
    },
    "cohere2": {
        "max_position_embeddings": 8192,
        "bos_token_id": 5,
        "eos_token_ids": (255001,),
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "layer_kinds": _by_period(4, _WINDOW, LayerKind(rope=None)),
        "logit_scale": 0.0625,
    },
    "gemma3": _GEMMA
    | {
        "max_position_embeddings": 131072,
        "ropes": (RopeConfig(theta=1e6), RopeConfig(theta=1e4)),
        "layer_kinds": _by_period(6, LayerKind(4096, rope=1), LayerKind()),
    },
    "gemma2": _GEMMA
    | {
        "max_position_embeddings": 8192,
        "layer_kinds": _by_period(2, _WINDOW, LayerKind()),
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
    },
    "qwen3_moe": _QWEN
    | {
        "num_kv_heads": 4,
        "layer_kinds": _ALL_EXPERTS,
        "experts": ExpertsConfig(128, 8, 768, normalized=False),
    },
    "mixtral": _MISTRAL
    | {
        "norm_eps": 1e-5,
        "ropes": (RopeConfig(theta=1e6),),
        "layer_kinds": _ALL_EXPERTS,
        "experts": ExpertsConfig(8, 2, 96),
    },
}
"""Fields that follow from `REQUIRED`, where they are not 32 KV heads of 8 and a plain ModelConfig's."""


def test_every_family_is_in_the_table() -> None:
    assert DEFAULTS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_missing_keys_have_the_defaults_of_transformers(name: str) -> None:
    names = _NAMES.get(name, {})
    required = {names.get(key, key): value for key, value in REQUIRED.items()}
    if name == "gpt2":
        del required["intermediate_size"]
    fields = {"num_kv_heads": 32, "head_dim": 8, "intermediate_size": 96, "dtype": "float32"}
    expected = ModelConfig(
        architecture=name,
        num_layers=8,
        hidden_size=256,
        num_heads=32,
        vocab_size=300000,
        **fields | DEFAULTS[name],
    )
    assert parse_hf_config(required | {"model_type": FAMILIES[name].hf_model_type}) == expected


def test_the_sizes_of_gemma3_have_defaults() -> None:
    config = parse_hf_config({"model_type": "gemma3_text"})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (262208, 2304, 9216)
    assert (config.num_layers, config.num_heads) == (26, 8)
