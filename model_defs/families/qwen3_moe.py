"""Qwen3-MoE and Qwen3-Coder: Qwen3 with experts in place of MLPs.

Owns the family's config.json, weight map and presets. Layers may be of two kinds: `mlp_only_layers` and those
that `decoder_sparse_step` skips have an MLP of `intermediate_size`, all others experts of
`moe_intermediate_size`. Without `norm_topk_prob` the factors of a token's experts are their shares of all
experts; published models have it. The chat template of the thinking models is Qwen3's; that of Coder and of
the instruct models only appends.
"""

import functools
from typing import Any

from model_defs.config import ExpertsConfig, LayerKind, ModelConfig, RopeConfig
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
from model_defs.gated_decoder import GatedDecoder
from model_defs.head_norms import HeadNormLayer, head_norm_recipes
from model_defs.hf_options import boolean, integer
from model_defs.layers import Build
from model_defs.tensor_recipes import ExpertNames, WeightMap, expert_recipes
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=32768, num_kv_heads=4)
_NAMES = ExpertNames(
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
_MOE, _DENSE = LayerKind(mlp="moe"), LayerKind()

_PRESETS = {
    "qwen3-30b-a3b": ModelConfig(
        architecture="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        vocab_size=151936,
        max_position_embeddings=40960,
        bos_token_id=151643,
        eos_token_ids=(151645,),
        norm_eps=1e-6,
        ropes=(RopeConfig(theta=1e6),),
        layer_kinds=(_MOE,) * 48,
        experts=ExpertsConfig(num_experts=128, num_chosen=8, width=768),
    ),
    "qwen3_moe-tiny": tiny_preset(
        "qwen3_moe", layer_kinds=(_MOE,) * 2, experts=ExpertsConfig(num_experts=8, num_chosen=3, width=64)
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    experts = ExpertsConfig(
        num_experts=_num_experts(values),
        num_chosen=integer(values, "num_experts_per_tok", 8),
        width=integer(values, "moe_intermediate_size", 768),
        normalized=boolean(values, "norm_topk_prob", False),
    )
    return parse_gated(
        "qwen3_moe",
        values,
        generation,
        _DEFAULTS,
        attention_bias=boolean(values, "attention_bias", False),
        layer_kinds=_layer_kinds(values),
        experts=experts,
    )


def _num_experts(values: dict[str, Any]) -> int:
    """Return the number of experts: `num_experts` in published files, which transformers 5 renames."""
    old, new = (values.get(name) for name in ("num_experts", "num_local_experts"))
    if None not in (old, new) and old != new:
        raise UnsupportedModelError(
            f"config.json: num_experts={old!r} with a different num_local_experts={new!r}; keep one"
        )
    return integer(values, "num_experts" if new is None else "num_local_experts", 128)


def _layer_kinds(values: dict[str, Any]) -> tuple[LayerKind, ...]:
    """Return the kind of every layer; raise UnsupportedModelError if none has experts."""
    num_layers, step = integer(values, "num_hidden_layers"), integer(values, "decoder_sparse_step", 1)
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise UnsupportedModelError(f"config.json: mlp_only_layers={dense!r} must be a list of layers")
    if not all(0 <= layer < num_layers for layer in dense):
        raise UnsupportedModelError(
            f"config.json: mlp_only_layers={dense!r:.80} must be a list of layers from 0 to {num_layers - 1}"
        )
    has_experts = [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)]
    if not any(has_experts):
        raise UnsupportedModelError(
            f"config.json: decoder_sparse_step={step} and mlp_only_layers={dense!r} leave no layer with "
            f"experts; such a model is a Qwen3ForCausalLM"
        )
    return tuple(_MOE if has else _DENSE for has in has_experts)


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return written_gated(config) | {
        "attention_bias": config.attention_bias,
        "use_sliding_window": False,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, kind in enumerate(config.layer_kinds) if kind == _DENSE],
    }


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(HeadNormLayer, build))


def _weight_map(config: ModelConfig) -> WeightMap:
    outer, layer = gated_weight_map(config)
    assert config.experts is not None
    experts = expert_recipes(config.hidden_size, config.experts, _NAMES)
    return WeightMap(outer, layer | experts | head_norm_recipes(config.head_dim))


FAMILY = Family(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
