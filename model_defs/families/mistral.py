"""Mistral 7B and similar models: the gated decoder with grouped heads and without biases.

Owns the family's config.json, weight map and presets. A sliding window is that of all layers. If config.json
does not mention it, the window is 4,096, as in transformers: this is Mistral's first version, and later
versions have null. The chat templates write `[INST]` around a user's message and an end-of-sequence token
after a reply. They continue a conversation unchanged, unless it has a system message. Later versions move
that to the last user message, so each turn computes the context again from where it stood.
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
    refuse_sliding_layers,
    written_gated,
)
from model_defs.gated_decoder import GatedDecoder, GatedLayer
from model_defs.hf_layer_types import kinds_of_one_window, written_one_window
from model_defs.layers import Build
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=131072, bos=1, eos=2, num_kv_heads=8)
_DEFAULT_WINDOW = 4096

_PRESETS = {
    "mistral-7b": ModelConfig(  # version 0.3
        architecture="mistral",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=32768,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_ids=(2,),
        ropes=(RopeConfig(theta=1e6),),
    ),
    "mistral-small-24b": ModelConfig(  # Small 3.1 and 3.2
        architecture="mistral",
        num_layers=40,
        hidden_size=5120,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=32768,
        vocab_size=131072,
        max_position_embeddings=131072,
        bos_token_id=1,
        eos_token_ids=(2,),
        ropes=(RopeConfig(theta=1e9),),
    ),
    "mistral-tiny": tiny_preset("mistral", num_heads=8),
    "mistral-window-tiny": tiny_preset("mistral", num_heads=8, layer_kinds=(LayerKind(window=32),) * 2),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    refuse_sliding_layers(values)
    kinds = kinds_of_one_window(values, _DEFAULT_WINDOW)
    return parse_gated("mistral", values, generation, _DEFAULTS, layer_kinds=kinds)


def _write(config: ModelConfig) -> dict[str, Any]:
    return written_gated(config) | written_one_window(config)


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(GatedLayer, build))


FAMILY = Family(
    name="mistral",
    hf_architecture="MistralForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gated_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
    window_of_all_layers=True,
)
