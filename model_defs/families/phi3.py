"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: the gated decoder without biases, from fused tensors.

Owns the family's config.json, weight map and presets. A checkpoint has queries, keys and values in one
tensor, and gate and up in another. Phi-4-mini rotates three quarters of each head. Models with a long context
divide each rotary frequency by one of two tables (longrope). transformers changes the table within a long
sequence, which would make cached keys wrong. Here the served context decides once, for sequences of any
length. A sliding window is that of all layers, as in Phi-3-mini. The chat templates write markers such as
`<|user|>` around a message and can continue a conversation unchanged.
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
from model_defs.gated_decoder import GatedDecoder, GatedLayer
from model_defs.hf_layer_types import kinds_of_one_window, written_one_window
from model_defs.hf_options import integer
from model_defs.hf_rope import parse_longrope
from model_defs.layers import Build
from model_defs.tensor_recipes import WeightMap, from_one_tensor
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=4096, bos=1, eos=32000, norm_eps=1e-5)
_DEFAULT_ORIGINAL = 4096

_PRESETS = {
    "phi4": ModelConfig(
        architecture="phi3",
        num_layers=40,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=10,
        head_dim=128,
        intermediate_size=17920,
        vocab_size=100352,
        max_position_embeddings=16384,
        bos_token_id=100257,
        eos_token_ids=(100265,),
        ropes=(RopeConfig(theta=250000.0),),
    ),
    "phi3-tiny": tiny_preset("phi3", ropes=(RopeConfig(rotary_fraction=0.75),)),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    kinds = kinds_of_one_window(values)
    max_positions = integer(values, "max_position_embeddings", _DEFAULTS.max_positions)
    rope = parse_longrope(values, max_positions, _DEFAULT_ORIGINAL)
    return parse_gated("phi3", values, generation, _DEFAULTS, layer_kinds=kinds, ropes=(rope,))


def _write(config: ModelConfig) -> dict[str, Any]:
    return written_gated(config) | written_one_window(config)


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(GatedLayer, build))


def _weight_map(config: ModelConfig) -> WeightMap:
    outer, layer = gated_weight_map(config)
    fused = {"qkv.proj.kernel": "self_attn.qkv_proj.weight", "mlp.gate_up.kernel": "mlp.gate_up_proj.weight"}
    return WeightMap(outer, layer | {name: from_one_tensor(layer[name], fused[name]) for name in fused})


FAMILY = Family(
    name="phi3",
    hf_architecture="Phi3ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
