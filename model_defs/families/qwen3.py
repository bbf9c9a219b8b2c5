"""Qwen3: the gated decoder with a norm over each head of queries and keys, before the rotation.

Owns the family's config.json, weight map and presets. `head_dim` is a separate option: heads
times `head_dim` need not equal the hidden size. Some layers may have a window; see `qwen_layer_kinds`. The
official chat template removes the reasoning of a reply when a later question follows, and puts empty
reasoning before a reply without any. So a turn replaces the end of the earlier tokens, and computes it again.
"""

import functools
from typing import Any

from model_defs.config import LayerKind, ModelConfig, RopeConfig
from model_defs.family import Family
from model_defs.gated_checkpoints import (
    TENSOR_PREFIX,
    Defaults,
    gated_weight_map,
    parse_gated,
    qwen_layer_kinds,
    written_gated,
    written_qwen_kinds,
)
from model_defs.gated_decoder import GatedDecoder
from model_defs.head_norms import HeadNormLayer, head_norm_recipes
from model_defs.hf_options import boolean
from model_defs.layers import Build
from model_defs.tensor_recipes import WeightMap
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=32768, num_kv_heads=32, head_dim=128)

_PRESETS = {
    "qwen3-8b": ModelConfig(
        architecture="qwen3",
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        max_position_embeddings=40960,
        bos_token_id=151643,
        eos_token_ids=(151645,),
        norm_eps=1e-6,
        ropes=(RopeConfig(theta=1e6),),
    ),
    "qwen3-tiny": tiny_preset("qwen3"),
    "qwen3-window-tiny": tiny_preset(
        "qwen3", num_layers=4, layer_kinds=(LayerKind(window=32), LayerKind()) * 2
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    bias = boolean(values, "attention_bias", False)
    kinds = qwen_layer_kinds(values)
    return parse_gated("qwen3", values, generation, _DEFAULTS, attention_bias=bias, layer_kinds=kinds)


def _write(config: ModelConfig) -> dict[str, Any]:
    return written_gated(config) | written_qwen_kinds(config) | {"attention_bias": config.attention_bias}


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(HeadNormLayer, build))


def _weight_map(config: ModelConfig) -> WeightMap:
    outer, layer = gated_weight_map(config)
    return WeightMap(outer, layer | head_norm_recipes(config.head_dim))


FAMILY = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
