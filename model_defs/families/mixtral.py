"""Mixtral: the gated decoder of Mistral with experts in place of every MLP.

Owns the family's config.json, weight map and presets. The factors of a token's experts add up to 1. A sliding
window is that of all layers; published models have none. The chat template is that of Mistral's first
versions: it continues a conversation unchanged.
"""

import functools
from typing import Any

from model_defs.config import ExpertsConfig, LayerKind, ModelConfig, RopeConfig
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
from model_defs.layers import Build
from model_defs.tensor_recipes import ExpertNames, WeightMap, expert_recipes
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=131072, bos=1, eos=2, num_kv_heads=8, norm_eps=1e-5)
_THETA = 1e6  # if config.json has none
_NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)
_MOE = LayerKind(mlp="moe")

_PRESETS = {
    "mixtral-8x7b": ModelConfig(
        architecture="mixtral",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=32000,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_ids=(2,),
        ropes=(RopeConfig(theta=1e6),),
        layer_kinds=(_MOE,) * 32,
        experts=ExpertsConfig(num_experts=8, num_chosen=2, width=14336),
    ),
    "mixtral-tiny": tiny_preset(
        "mixtral",
        num_heads=8,
        layer_kinds=(_MOE,) * 2,
        experts=ExpertsConfig(num_experts=4, num_chosen=2, width=128),
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    if values.get("rope_theta") is None:
        values = values | {"rope_theta": _THETA}
    kinds = kinds_of_one_window(values, mlp="moe")
    experts = ExpertsConfig(
        num_experts=integer(values, "num_local_experts", 8),
        num_chosen=integer(values, "num_experts_per_tok", 2),
        width=integer(values, "intermediate_size", 14336),
    )
    return parse_gated("mixtral", values, generation, _DEFAULTS, layer_kinds=kinds, experts=experts)


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    options = {
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
    }
    return written_gated(config) | written_one_window(config) | options


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(GatedLayer, build))


def _weight_map(config: ModelConfig) -> WeightMap:
    outer, layer = gated_weight_map(config)
    assert config.experts is not None
    return WeightMap(outer, layer | expert_recipes(config.hidden_size, config.experts, _NAMES))


FAMILY = Family(
    name="mixtral",
    hf_architecture="MixtralForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
