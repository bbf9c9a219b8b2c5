"""Gemma 3: five of six layers have a window, and norms of each head replace the soft cap of scores.

Owns the layer, and the family's config.json, weight map and presets. Layers with a window have their own
rotary positions. The text half of the multimodal sizes is the same model, and their files leave out options
that have default values. The chat template writes a beginning-of-sequence token, puts a system message into
the first user message, and continues a conversation unchanged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from model_defs.config import LayerKind, ModelConfig, RopeConfig
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.gated_checkpoints import TENSOR_PREFIX, Defaults, parse_gated, written_gated
from model_defs.gemma_decoder import (
    GemmaDecoder,
    cap,
    gemma_fields,
    gemma_weight_map,
    one_plus,
    written_gemma,
)
from model_defs.hf_layer_types import layer_windows, written_windows
from model_defs.hf_options import integer, number
from model_defs.hf_rope import parse_rope, parse_ropes_by_type
from model_defs.layers import Build, HeadNorm, WideScaleRMSNorm
from model_defs.sandwich_layer import SandwichLayer
from model_defs.tensor_recipes import WeightMap
from model_defs.tiny_preset import tiny_preset

_HEAD_DIM, _MAX_POSITIONS = 256, 131072
_THETA, _LOCAL_THETA = 1e6, 1e4
_DEFAULTS = Defaults(
    max_positions=_MAX_POSITIONS, bos=2, eos=1, num_kv_heads=4, head_dim=_HEAD_DIM, tie_word_embeddings=True
)
_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Defaults of options that other families must have."""


def _kinds(windows: tuple[int | None, ...]) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(window, rope=0 if window is None else 1) for window in windows)


_PRESETS = {
    "gemma3-12b": ModelConfig(
        architecture="gemma3",
        num_layers=48,
        hidden_size=3840,
        num_heads=16,
        num_kv_heads=8,
        head_dim=_HEAD_DIM,
        intermediate_size=15360,
        vocab_size=262208,
        max_position_embeddings=_MAX_POSITIONS,
        bos_token_id=2,
        eos_token_ids=(1, 106),
        tie_word_embeddings=True,
        activation="geglu_tanh",
        norm_eps=1e-6,
        ropes=(RopeConfig("linear", _THETA, 8.0), RopeConfig(theta=_LOCAL_THETA)),
        layer_kinds=_kinds((1024, 1024, 1024, 1024, 1024, None) * 8),
    ),
    "gemma3-tiny": tiny_preset(
        "gemma3",
        tie_word_embeddings=True,
        activation="geglu_tanh",
        ropes=(RopeConfig(theta=_THETA), RopeConfig(theta=_LOCAL_THETA)),
        layer_kinds=_kinds((24, None)),
    ),
}


class Gemma3Layer(SandwichLayer):
    """Layer with four norms that norms each head of queries and keys, too."""

    def __init__(self, build: Build, kind: LayerKind) -> None:
        """Declare the layer's arrays."""
        bias = build.config.attention_bias
        super().__init__(build, kind, qkv_bias=bias, out_bias=bias, norm=WideScaleRMSNorm)
        wide = jnp.dtype(jnp.float32)
        self.q_norm, self.k_norm = HeadNorm(build, wide), HeadNorm(build, wide)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    values = _SIZES | values
    if values.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError(
            f"attn_logit_softcapping={values['attn_logit_softcapping']!r} is not supported in Gemma 3, where "
            f"transformers does not apply it; set it to null"
        )
    period = integer(values, "sliding_window_pattern", 6)
    return parse_gated(
        "gemma3",
        values,
        generation,
        _DEFAULTS,
        layer_kinds=_kinds(layer_windows(values, period=period, window=4096)),
        ropes=_ropes(values),
        logit_softcap=cap(values, "final_logit_softcapping", None),
        **gemma_fields(values, integer(values, "head_dim", _HEAD_DIM)),
    )


def _ropes(values: dict[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Read the rope of layers that see all tokens, and that of layers with a window."""
    max_positions = integer(values, "max_position_embeddings", _MAX_POSITIONS)
    local = number(values, "rope_local_base_freq", _LOCAL_THETA, above=1)
    if values.get("rope_parameters") is not None:
        theta = number(values, "rope_theta", _THETA, above=1)
        return parse_ropes_by_type(values, max_positions, theta, local)
    return parse_rope(values, max_positions, _THETA), RopeConfig(theta=local)


def _write(config: ModelConfig) -> dict[str, Any]:
    return (
        written_gated(config)
        | written_gemma(config)
        | written_windows(config)
        | {"rope_local_base_freq": config.ropes[1].theta, "final_logit_softcapping": config.logit_softcap}
    )


def _make_model(build: Build) -> GemmaDecoder:
    return GemmaDecoder(build, functools.partial(Gemma3Layer, build))


def _weight_map(config: ModelConfig) -> WeightMap:
    outer, layer = gemma_weight_map(config)
    norms = {
        f"{name}.scale": one_plus(f"self_attn.{name}.weight", config.head_dim)
        for name in ("q_norm", "k_norm")
    }
    return WeightMap(outer, layer | norms)


FAMILY = Family(
    name="gemma3",
    hf_architecture="Gemma3ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
    model_type="gemma3_text",
)
