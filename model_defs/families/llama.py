"""Llama 2 and 3: the plain gated decoder, with optional biases on all projections.

Owns the family's config.json, weight map and presets. A Llama of transformers has no sliding window: a file
with sliding-window layers describes another model and is rejected. `sliding_window` alone, which exports of
other models contain, is ignored. Its chat templates (Llama 2's `[INST]`, Llama 3's headers) can continue a
conversation unchanged.
"""

import dataclasses
from typing import Any

from model_defs.config import ModelConfig, RopeConfig
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
from model_defs.hf_options import boolean
from model_defs.layers import Build
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=2048, bos=1, eos=2)

_LLAMA2_13B = ModelConfig(
    architecture="llama",
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    intermediate_size=13824,
    vocab_size=32000,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_ids=(2,),
)

_PRESETS = {
    "llama2-13b": _LLAMA2_13B,
    "llama2-13b-gqa10": dataclasses.replace(_LLAMA2_13B, num_kv_heads=10),
    "llama2-7b": dataclasses.replace(
        _LLAMA2_13B, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, intermediate_size=11008
    ),
    "llama2-70b": dataclasses.replace(
        _LLAMA2_13B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, intermediate_size=28672
    ),
    "llama3-8b": dataclasses.replace(
        _LLAMA2_13B,
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
        bos_token_id=128000,
        eos_token_ids=(128001,),
        ropes=(RopeConfig(theta=500000.0),),
    ),
    "llama-tiny": tiny_preset("llama"),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    return parse_gated(
        "llama",
        values,
        generation,
        _DEFAULTS,
        attention_bias=boolean(values, "attention_bias", False),
        mlp_bias=boolean(values, "mlp_bias", False),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return written_gated(config) | biases


def _make_model(build: Build) -> GatedDecoder:
    bias = build.config.attention_bias
    return GatedDecoder(build, lambda kind: GatedLayer(build, kind, qkv_bias=bias, out_bias=bias))


FAMILY = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gated_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
