"""Granite 3: the gated decoder with four multipliers, and optional biases on all projections.

Owns the family's config.json, weight map and presets. Embeddings, scores and logits have a factor. A fourth
multiplies what each block adds to the stream. Here the stream is divided by that factor instead, once, as
part of the embeddings' factor. A norm does not depend on the scale of its input but for its epsilon, which is
divided by the square. So a config has other values than the file, and describes the same function.
The chat templates write a default system message with the date, and can continue a conversation unchanged on
the same day.
"""

import functools
from typing import Any

from model_defs.config import ModelConfig, RopeConfig
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.gated_checkpoints import (
    TENSOR_PREFIX,
    Defaults,
    gated_weight_map,
    parse_gated,
    refuse_sliding_layers,
    written_gated,
)
from model_defs.gated_decoder import GatedDecoder, GatedLayer
from model_defs.hf_options import boolean, number
from model_defs.layers import Build
from model_defs.tiny_preset import tiny_preset

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_LEAST, _MOST = 1e-9, 1e9  # so that quotients and squares of multipliers are float32 numbers
_NORM_EPS = 1e-6

_PRESETS = {
    "granite-8b": ModelConfig(  # Granite 3.3
        architecture="granite",
        num_layers=40,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12800,
        vocab_size=49159,
        max_position_embeddings=131072,
        bos_token_id=0,
        eos_token_ids=(0,),
        tie_word_embeddings=True,
        norm_eps=1e-5 / 0.22**2,
        ropes=(RopeConfig(theta=1e7),),
        attention_scale=0.0078125,
        logit_scale=1 / 16,
        embedding_scale=12.0 / 0.22,
    ),
    "granite-tiny": tiny_preset("granite", attention_scale=0.125, logit_scale=0.5, embedding_scale=1.5),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    embedding, residual, attention, logits = (_read_multiplier(values, name) for name in _MULTIPLIERS)
    eps = number(values, "rms_norm_eps", _NORM_EPS) / residual**2
    return parse_gated(
        "granite",
        values | {"rms_norm_eps": eps},
        generation,
        Defaults(max_positions=2048, bos=1, eos=2),
        attention_bias=boolean(values, "attention_bias", False),
        mlp_bias=boolean(values, "mlp_bias", False),
        attention_scale=attention,
        logit_scale=1 / logits,
        embedding_scale=embedding / residual,
    )


def _read_multiplier(values: dict[str, Any], name: str) -> float:
    found = number(values, name, 1.0)
    if not _LEAST <= found <= _MOST:
        raise UnsupportedModelError(f"config.json: {name}={found!r} must be from {_LEAST:g} to {_MOST:g}")
    return found


def _write(config: ModelConfig) -> dict[str, Any]:
    scale = config.attention_scale
    return written_gated(config) | {
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": 1.0,
        "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
        "logits_scaling": 1 / config.logit_scale,
    }


def _make_model(build: Build) -> GatedDecoder:
    bias = build.config.attention_bias
    return GatedDecoder(build, functools.partial(GatedLayer, build, qkv_bias=bias, out_bias=bias))


FAMILY = Family(
    name="granite",
    hf_architecture="GraniteForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gated_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
