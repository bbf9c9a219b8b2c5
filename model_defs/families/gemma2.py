"""Gemma 2: every other layer has a window, and scores and logits are capped softly.

Owns the family's config.json, weight map and presets. The chat template writes a beginning-of-sequence token,
has no system message, and continues a conversation unchanged.
"""

import functools
from typing import Any

from model_defs.config import LayerKind, ModelConfig
from model_defs.family import Family
from model_defs.gated_checkpoints import TENSOR_PREFIX, Defaults, parse_gated, written_gated
from model_defs.gemma_decoder import GemmaDecoder, cap, gemma_fields, gemma_weight_map, written_gemma
from model_defs.hf_layer_types import layer_windows, written_windows
from model_defs.hf_options import integer
from model_defs.layers import Build, WideScaleRMSNorm
from model_defs.sandwich_layer import SandwichLayer
from model_defs.tiny_preset import tiny_preset

_HEAD_DIM = 256
_DEFAULTS = Defaults(
    max_positions=8192, bos=2, eos=1, num_kv_heads=4, head_dim=_HEAD_DIM, tie_word_embeddings=True
)
_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0


def _kinds(windows: tuple[int | None, ...]) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(window) for window in windows)


_PRESETS = {
    "gemma2-9b": ModelConfig(
        architecture="gemma2",
        num_layers=42,
        hidden_size=3584,
        num_heads=16,
        num_kv_heads=8,
        head_dim=_HEAD_DIM,
        intermediate_size=14336,
        vocab_size=256000,
        max_position_embeddings=8192,
        bos_token_id=2,
        eos_token_ids=(1,),
        tie_word_embeddings=True,
        activation="geglu_tanh",
        norm_eps=1e-6,
        layer_kinds=_kinds((4096, None) * 21),
        attention_softcap=_SCORE_CAP,
        logit_softcap=_LOGIT_CAP,
    ),
    "gemma2-tiny": tiny_preset(
        "gemma2",
        tie_word_embeddings=True,
        activation="geglu_tanh",
        layer_kinds=_kinds((24, None)),
        attention_softcap=_SCORE_CAP,
        logit_softcap=_LOGIT_CAP,
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    return parse_gated(
        "gemma2",
        values,
        generation,
        _DEFAULTS,
        layer_kinds=_kinds(layer_windows(values, period=2, window=4096)),
        attention_softcap=cap(values, "attn_logit_softcapping", _SCORE_CAP),
        logit_softcap=cap(values, "final_logit_softcapping", _LOGIT_CAP),
        **gemma_fields(values, integer(values, "head_dim", _HEAD_DIM)),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return (
        written_gated(config)
        | written_gemma(config)
        | written_windows(config)
        | {
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    )


def _make_model(build: Build) -> GemmaDecoder:
    bias = build.config.attention_bias
    make_layer = functools.partial(SandwichLayer, build, qkv_bias=bias, out_bias=bias, norm=WideScaleRMSNorm)
    return GemmaDecoder(build, make_layer)


FAMILY = Family(
    name="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gemma_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
