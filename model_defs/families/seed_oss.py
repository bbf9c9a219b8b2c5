"""Seed-OSS: the plain gated decoder with biases on queries, keys and values, and heads of their own size.

Owns the family's config.json, weight map and presets. Heads are together wider than the hidden size. The chat
template marks reasoning by `<seed:think>`.
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
from model_defs.hf_options import boolean
from model_defs.layers import Build
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=524288, bos=0, eos=2, num_kv_heads=8, head_dim=128)

_PRESETS = {
    "seed-oss-36b": ModelConfig(
        architecture="seed_oss",
        num_layers=64,
        hidden_size=5120,
        num_heads=80,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=27648,
        vocab_size=155136,
        max_position_embeddings=524288,
        bos_token_id=0,
        eos_token_ids=(2,),
        norm_eps=1e-6,
        attention_bias=True,
        ropes=(RopeConfig(theta=1e7),),
    ),
    "seed_oss-tiny": tiny_preset("seed_oss", attention_bias=True),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    if boolean(values, "attention_out_bias", False):
        raise UnsupportedModelError("attention_out_bias=True is not supported; False is")
    return parse_gated(
        "seed_oss",
        values,
        generation,
        _DEFAULTS,
        attention_bias=boolean(values, "attention_bias", True),
        mlp_bias=boolean(values, "mlp_bias", False),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return written_gated(config) | biases


def _make_model(build: Build) -> GatedDecoder:
    layer = functools.partial(GatedLayer, build, qkv_bias=build.config.attention_bias)
    return GatedDecoder(build, layer)


FAMILY = Family(
    name="seed_oss",
    hf_architecture="SeedOssForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gated_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
