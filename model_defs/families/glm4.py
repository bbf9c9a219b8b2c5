"""GLM-4 of April 2025 (GLM-4-0414, GLM-Z1): norms before and behind both blocks, and partial rotation.

Owns the family's config.json, weight map and presets. A part of each head is rotated, in adjacent pairs of
elements, and gate and up are one tensor. Queries, keys and values may have a bias. The chat template marks
each role by a token, and the next role's token ends a reply. That of GLM-4-0414 continues a conversation
unchanged.
"""

import functools
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
from model_defs.gated_decoder import GatedDecoder
from model_defs.hf_options import boolean, integer
from model_defs.hf_rope import parse_rope
from model_defs.layers import Build
from model_defs.sandwich_layer import SandwichLayer
from model_defs.tensor_recipes import WeightMap, attention_recipes, from_one_tensor
from model_defs.tiny_preset import tiny_preset

_MAX_POSITIONS, _ROTARY_FRACTION = 131072, 0.5
_DEFAULTS = Defaults(max_positions=_MAX_POSITIONS, num_kv_heads=2, head_dim=128, norm_eps=1.5625e-7)
_EOS = [151329, 151336, 151338]
_NORMS = {
    "input_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}

_PRESETS = {
    "glm4-9b": ModelConfig(
        architecture="glm4",
        num_layers=40,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=13696,
        vocab_size=151552,
        max_position_embeddings=32768,
        eos_token_ids=tuple(_EOS),
        ropes=(RopeConfig(rotary_fraction=_ROTARY_FRACTION),),
    ),
    "glm4-tiny": tiny_preset(
        "glm4", attention_bias=True, ropes=(RopeConfig(rotary_fraction=_ROTARY_FRACTION),)
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    max_positions = integer(values, "max_position_embeddings", _MAX_POSITIONS)
    if values.get("eos_token_id") is None:
        values = values | {"eos_token_id": _EOS}
    return parse_gated(
        "glm4",
        values,
        generation,
        _DEFAULTS,
        attention_bias=boolean(values, "attention_bias", True),
        ropes=(parse_rope(values, max_positions, fraction_default=_ROTARY_FRACTION),),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return written_gated(config) | {
        "attention_bias": config.attention_bias,
        "partial_rotary_factor": config.ropes[0].rotary_fraction,
    }


def _make_model(build: Build) -> GatedDecoder:
    make_layer = functools.partial(SandwichLayer, build, qkv_bias=build.config.attention_bias)
    return GatedDecoder(build, make_layer)


def _weight_map(config: ModelConfig) -> WeightMap:
    outer, layer = gated_weight_map(config, _NORMS)
    num_adjacent = config.ropes[0].rotary_dim(config.head_dim)
    name = "mlp.gate_up.kernel"
    return WeightMap(
        outer,
        layer
        | attention_recipes(config, "o_proj", num_adjacent=num_adjacent)
        | {name: from_one_tensor(layer[name], "mlp.gate_up_proj.weight")},
    )


FAMILY = Family(
    name="glm4",
    hf_architecture="Glm4ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
