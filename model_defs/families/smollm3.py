"""SmolLM3: a Llama whose layers at regular intervals do not rotate queries and keys (NoPE).

Owns the family's config.json, weight map and presets. With `use_sliding_window`, `layer_types` says which
layers have the window; without that list, those that do not rotate have it. The chat template writes a system
message with the current date, so the first turn of a day computes a conversation again.
"""

import functools
from typing import Any

from model_defs.config import LayerKind, ModelConfig, RopeConfig
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
from model_defs.gated_decoder import GatedDecoder, GatedLayer
from model_defs.hf_layer_types import layer_windows, written_windows
from model_defs.hf_options import boolean, integer
from model_defs.layers import Build
from model_defs.tiny_preset import tiny_preset

_DEFAULTS = Defaults(
    max_positions=32768, bos=128000, eos=128001, num_kv_heads=4, rope_theta=2e6, tie_word_embeddings=True
)
_INTERVAL = 4


def _kinds(rotates: list[bool], windows: tuple[int | None, ...]) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind(window=window, rope=0 if has else None)
        for has, window in zip(rotates, windows, strict=True)
    )


_PRESETS = {
    "smollm3-3b": ModelConfig(
        architecture="smollm3",
        num_layers=36,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=128256,
        max_position_embeddings=65536,
        bos_token_id=128000,
        eos_token_ids=(128012,),
        tie_word_embeddings=True,
        norm_eps=1e-6,
        ropes=(RopeConfig(theta=5e6),),
        layer_kinds=_kinds([True, True, True, False] * 9, (None,) * 36),
    ),
    "smollm3-tiny": tiny_preset(
        "smollm3", tie_word_embeddings=True, layer_kinds=_kinds([True, False], (None,) * 2)
    ),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    num_layers = integer(values, "num_hidden_layers")
    rotates = _rotating_layers(values, num_layers)
    windows: tuple[int | None, ...] = (None,) * num_layers
    if not boolean(values, "use_sliding_window", False):
        refuse_sliding_layers(values)
    elif values.get("layer_types") is not None:
        windows = layer_windows(values, period=_INTERVAL, window=None)
    elif values.get("sliding_window") is not None:
        window = integer(values, "sliding_window")
        windows = tuple(None if has else window for has in rotates)
    return parse_gated(
        "smollm3",
        values,
        generation,
        _DEFAULTS,
        attention_bias=boolean(values, "attention_bias", False),
        mlp_bias=boolean(values, "mlp_bias", False),
        layer_kinds=_kinds(rotates, windows),
    )


def _rotating_layers(values: dict[str, Any], num_layers: int) -> list[bool]:
    """Return whether each layer rotates: `no_rope_layers` has a 1 for a layer that does."""
    found = values.get("no_rope_layers")
    if found is None:
        interval = integer(values, "no_rope_layer_interval", _INTERVAL)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(found, list) or len(found) < num_layers or any(one not in (0, 1) for one in found):
        raise UnsupportedModelError(
            f"config.json: no_rope_layers={found!r:.80} must be a list of num_hidden_layers={num_layers} "
            f"entries, 0 or 1"
        )
    return list(map(bool, found[:num_layers]))


def _write(config: ModelConfig) -> dict[str, Any]:
    rotates = [kind.rope is not None for kind in config.layer_kinds] or [True] * config.num_layers
    windows = written_windows(config)
    return (
        written_gated(config)
        | windows
        | {
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
            "no_rope_layers": list(map(int, rotates)),
            "use_sliding_window": windows["sliding_window"] is not None,
        }
    )


def _make_model(build: Build) -> GatedDecoder:
    bias = build.config.attention_bias
    return GatedDecoder(build, functools.partial(GatedLayer, build, qkv_bias=bias, out_bias=bias))


FAMILY = Family(
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=gated_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
