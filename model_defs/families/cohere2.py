"""Cohere 2 (Command R7B, Command A): attention and MLP read the output of the same norm.

Owns the layer, and the family's config.json, weight map and presets. Norms are layer norms without a bias,
and logits are scaled. Three of four layers have a window. These rotate adjacent elements of heads, the others
none. The official chat templates write a long preamble first, and continue a conversation unchanged.
"""

import functools
from typing import Any

import jax

from model_defs.all_reduce import Summand, add_terms
from model_defs.attention import Attention
from model_defs.config import LayerKind, ModelConfig, RopeConfig
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.gated_checkpoints import (
    TENSOR_PREFIX,
    Defaults,
    gated_weight_map,
    parse_gated,
    written_gated,
)
from model_defs.gated_decoder import GatedBlocks, GatedDecoder
from model_defs.hf_layer_types import layer_windows, written_windows
from model_defs.hf_options import boolean, integer, number
from model_defs.layers import Build, LayerNormWithoutBias
from model_defs.rope import Rotation
from model_defs.tensor_recipes import WeightMap, attention_recipes
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(max_positions=8192, bos=5, eos=255001, tie_word_embeddings=True)
_LOGIT_SCALE = 0.0625


def _kinds(windows: tuple[int | None, ...]) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(window, rope=None if window is None else 0) for window in windows)


_PRESETS = {
    "command-r7b": ModelConfig(
        architecture="cohere2",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=256000,
        max_position_embeddings=132096,
        bos_token_id=5,
        eos_token_ids=(255001,),
        tie_word_embeddings=True,
        ropes=(RopeConfig(theta=5e4),),
        layer_kinds=_kinds((4096, 4096, 4096, None) * 8),
        logit_scale=0.25,
    ),
    "cohere2-tiny": tiny_preset(
        "cohere2",
        hidden_size=128,
        tie_word_embeddings=True,
        layer_kinds=_kinds((24, None)),
        logit_scale=0.25,
    ),
}


class Cohere2Layer(GatedBlocks):
    """Decoder layer that adds attention and a gated MLP of the same normed stream."""

    def __init__(self, build: Build, kind: LayerKind) -> None:
        """Declare the layer's arrays."""
        bias = build.config.attention_bias
        super().__init__(build, kind, qkv_bias=bias, out_bias=bias)
        self.input_norm = LayerNormWithoutBias(build)

    def __call__(
        self,
        layer_index: int,
        x: jax.Array,
        y: Summand | None,
        rotation: Rotation | None,
        attention: Attention,
    ) -> tuple[jax.Array, Summand]:
        """Run the layer on the stream f32[T, hidden_size] and a pending term; return both after the layer."""
        x, normed = self.input_norm.add(x, y)
        return x, add_terms(self.attend(layer_index, normed, rotation, attention), self.mlp(normed))


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    hidden_size, num_heads = (integer(values, name) for name in ("hidden_size", "num_attention_heads"))
    if integer(values, "head_dim", hidden_size // num_heads) * num_heads != hidden_size:
        raise UnsupportedModelError(
            f"head_dim={values.get('head_dim')} is not supported: it must be hidden_size={hidden_size} over "
            f"num_attention_heads={num_heads}"
        )
    period = integer(values, "sliding_window_pattern", 4)
    return parse_gated(
        "cohere2",
        values,
        generation,
        _DEFAULTS,
        attention_bias=boolean(values, "attention_bias", False),
        norm_eps=number(values, "layer_norm_eps", 1e-5),
        layer_kinds=_kinds(layer_windows(values, period=period, window=4096)),
        logit_scale=number(values, "logit_scale", _LOGIT_SCALE),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return (
        written_gated(config)
        | written_windows(config)
        | {
            "attention_bias": config.attention_bias,
            "layer_norm_eps": config.norm_eps,
            "logit_scale": config.logit_scale,
        }
    )


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(Cohere2Layer, build), norm=LayerNormWithoutBias)


def _weight_map(config: ModelConfig) -> WeightMap:
    outer, layer = gated_weight_map(config, {"input_norm": "input_layernorm"})
    return WeightMap(outer, layer | attention_recipes(config, "o_proj", num_adjacent=config.head_dim))


FAMILY = Family(
    name="cohere2",
    hf_architecture="Cohere2ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
