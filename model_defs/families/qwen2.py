"""Qwen2 and Qwen2.5: the gated decoder with biases on queries, keys and values only.

Owns the family's config.json, weight map and presets. Small models of the family tie their embeddings.
Some layers may have a window; see `qwen_layer_kinds`.
A conversation has no beginning-of-sequence token unless the tokenizer's files ask for it. The chat templates
are ChatML with a default system message. They write it into the first turn, and can continue a conversation
unchanged.
"""

from typing import Any

from model_defs.config import ModelConfig, RopeConfig
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
from model_defs.gated_decoder import GatedDecoder, GatedLayer
from model_defs.layers import Build
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=32768, num_kv_heads=32)

_PRESETS = {
    "qwen2.5-7b": ModelConfig(
        architecture="qwen2",
        num_layers=28,
        hidden_size=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152064,
        max_position_embeddings=32768,
        bos_token_id=151643,
        eos_token_ids=(151645,),
        norm_eps=1e-6,
        attention_bias=True,
        ropes=(RopeConfig(theta=1e6),),
    ),
    "qwen2-tiny": tiny_preset("qwen2", attention_bias=True, tie_word_embeddings=True),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    kinds = qwen_layer_kinds(values)
    return parse_gated("qwen2", values, generation, _DEFAULTS, attention_bias=True, layer_kinds=kinds)


def _write(config: ModelConfig) -> dict[str, Any]:
    return written_gated(config) | written_qwen_kinds(config)


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, lambda kind: GatedLayer(build, kind, qkv_bias=True))


FAMILY = Family(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gated_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
