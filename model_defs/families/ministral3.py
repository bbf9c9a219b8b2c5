"""Ministral 3: a Mistral whose queries grow with the position, over YaRN.

Owns the family's config.json, weight map and presets. Most checkpoints are multimodal, and have this family
as their text half. The growth belongs to queries and not to keys, so cached keys stay right. The chat
templates write a default system message and `[INST]` around a user's message, and can continue a conversation
unchanged.
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
from model_defs.hf_layer_types import kinds_of_one_window, written_one_window
from model_defs.hf_options import integer, number
from model_defs.hf_rope import parse_growing_rope
from model_defs.layers import Build
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=262144, bos=1, eos=2, num_kv_heads=8, head_dim=128, norm_eps=1e-5)
_THETA = 1e6
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": _THETA,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

_PRESETS = {
    "ministral3-8b": ModelConfig(
        architecture="ministral3",
        num_layers=34,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=131072,
        max_position_embeddings=262144,
        bos_token_id=1,
        eos_token_ids=(2,),
        ropes=(RopeConfig("yarn", 1e6, 16.0, 16384, query_growth=0.1),),
    ),
    "ministral3-tiny": tiny_preset(
        "ministral3", ropes=(RopeConfig("yarn", 1e4, 64.0, 32, query_growth=0.1),)
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    kinds = kinds_of_one_window(values)
    if values.get("rope_parameters") is None and not values.get("rope_scaling"):
        if number(values, "rope_theta", _THETA, above=1) != _THETA:
            raise UnsupportedModelError(
                f"rope_theta={values['rope_theta']!r} is not supported without rope_parameters, for which "
                f"transformers takes {_THETA:g}; write rope_parameters"
            )
        values = values | {"rope_parameters": _DEFAULT_ROPE}
    max_positions = integer(values, "max_position_embeddings", _DEFAULTS.max_positions)
    rope = parse_growing_rope(values, max_positions)
    return parse_gated("ministral3", values, generation, _DEFAULTS, layer_kinds=kinds, ropes=(rope,))


def _write(config: ModelConfig) -> dict[str, Any]:
    return written_gated(config) | written_one_window(config)


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(GatedLayer, build))


FAMILY = Family(
    name="ministral3",
    hf_architecture="Ministral3ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gated_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
