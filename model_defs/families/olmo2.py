"""OLMo 2: norms behind the blocks instead of before them, and over all heads of queries and of keys.

Owns the family's config.json, weight map and presets. The chat template writes an end-of-text token at the
start of a conversation and after each reply, and continues a conversation unchanged.
"""

import functools
from typing import Any

from model_defs.config import ModelConfig, RopeConfig
from model_defs.family import Family
from model_defs.gated_checkpoints import (
    TENSOR_PREFIX,
    Defaults,
    parse_gated,
    refuse_sliding_layers,
    written_gated,
)
from model_defs.gated_decoder import GatedDecoder
from model_defs.hf_options import boolean
from model_defs.layers import Build
from model_defs.olmo_layer import OlmoLayer, olmo_weight_map
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=2048, eos=50279, norm_eps=1e-5)

_PRESETS = {
    "olmo2-7b": ModelConfig(
        architecture="olmo2",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=100352,
        max_position_embeddings=4096,
        eos_token_ids=(100257,),
        norm_eps=1e-6,
        ropes=(RopeConfig(theta=5e5),),
    ),
    "olmo2-tiny": tiny_preset("olmo2"),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    bias = boolean(values, "attention_bias", False)
    return parse_gated("olmo2", values, generation, _DEFAULTS, attention_bias=bias)


def _write(config: ModelConfig) -> dict[str, Any]:
    return written_gated(config) | {"attention_bias": config.attention_bias}


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(OlmoLayer, build))


FAMILY = Family(
    name="olmo2",
    hf_architecture="Olmo2ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=olmo_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
