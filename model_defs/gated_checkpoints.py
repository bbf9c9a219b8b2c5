"""Common format of gated decoders' checkpoints: the keys of config.json, and the names of tensors.

Owns the shared parts of `Family` rows. Each family adds its own: defaults of missing keys, biases of
projections, rejected options. Knows no family.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from model_defs.config import LayerKind, ModelConfig
from model_defs.errors import UnsupportedModelError
from model_defs.gated_decoder import check_rotary
from model_defs.hf_options import boolean, choice, common_fields, integer, number
from model_defs.hf_rope import parse_rope, written_rope
from model_defs.tensor_recipes import (
    Recipe,
    WeightMap,
    attention_recipes,
    gated_mlp_recipes,
    token_recipes,
    vector,
)

TENSOR_PREFIX = "model."
PLAIN_NORMS = MappingProxyType({"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
"""Tensors of the norms before both blocks, by our names."""
MakeScale = Callable[[str, int], Recipe]
_FIRST_WINDOW_LAYER, _QWEN_WINDOW = 28, 4096  # defaults of transformers


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Defaults of transformers for missing keys of config.json, which differ by family.

    `num_kv_heads` None means the number of heads; `head_dim` None means hidden size over heads.
    """

    max_positions: int
    bos: int | None = None
    eos: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False


def parse_gated(
    architecture: str,
    values: dict[str, Any],
    generation: dict[str, Any] | None,
    defaults: Defaults,
    **fields: Any,
) -> ModelConfig:
    """Read a config from both JSON objects; `fields` are those that the family reads itself.

    Raises UnsupportedModelError, which names the option.
    """
    common = common_fields(
        values, generation, bos=defaults.bos, eos=defaults.eos, max_positions=defaults.max_positions
    )
    hidden_size, num_heads = common["hidden_size"], common["num_heads"]
    if values.get("head_dim") is None and defaults.head_dim is None and hidden_size % num_heads:
        raise UnsupportedModelError(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}, "
            f"and there is no head_dim"
        )
    if "num_key_value_heads" in values:
        num_kv_heads = integer(values, "num_key_value_heads", num_heads)  # null means the number of heads
    else:
        num_kv_heads = defaults.num_kv_heads or num_heads
    if "ropes" not in fields:
        fields["ropes"] = (parse_rope(values, common["max_position_embeddings"], defaults.rope_theta),)
    if "activation" not in fields:
        fields["activation"] = choice(values, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    if "norm_eps" not in fields:
        fields["norm_eps"] = number(values, "rms_norm_eps", defaults.norm_eps)
    config = ModelConfig(
        architecture=architecture,
        **common,
        num_kv_heads=num_kv_heads,
        head_dim=integer(values, "head_dim", defaults.head_dim or hidden_size // num_heads),
        intermediate_size=integer(values, "intermediate_size"),
        tie_word_embeddings=boolean(values, "tie_word_embeddings", defaults.tie_word_embeddings),
        initializer_range=number(values, "initializer_range", 0.02),
        **fields,
    )
    check_rotary(config)
    return config


def written_gated(config: ModelConfig) -> dict[str, Any]:
    """Return the options that `parse_gated` reads beyond the common fields."""
    return {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
    } | written_rope(config.ropes[0])


def refuse_sliding_layers(values: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if some layers would see only a window of the context.

    `sliding_window` has no effect if `use_sliding_window` is false. Published Qwen configs have both.
    """
    if boolean(values, "use_sliding_window", False):
        raise UnsupportedModelError(
            f"use_sliding_window=true (sliding_window={values.get('sliding_window')!r}) is not supported: "
            f"every layer of this family sees the whole context"
        )
    types = _layer_types(values)
    if types is not None:
        _refuse_types(types, "full_attention")
        _check_count(types, values)


def _layer_types(values: dict[str, Any]) -> list[Any] | None:
    """Return `layer_types`, or None if the file has none."""
    types = values.get("layer_types")
    if not isinstance(types, list | None):
        raise UnsupportedModelError(f"config.json: layer_types={types!r} must be a list")
    return types


def _refuse_types(types: list[Any], *supported: str) -> None:
    for each in types:
        if each not in supported:
            expected = " and ".join(map(repr, supported))
            raise UnsupportedModelError(f"layer_types: {each!r} is not supported here; only {expected} is")


def _check_count(types: list[Any], values: dict[str, Any]) -> None:
    """Raise UnsupportedModelError unless there is a type for each layer."""
    num_layers = integer(values, "num_hidden_layers")
    if len(types) != num_layers:
        raise UnsupportedModelError(
            f"config.json: layer_types has {len(types)} entries; it must have num_hidden_layers={num_layers}"
        )


def qwen_layer_kinds(values: dict[str, Any]) -> tuple[LayerKind, ...]:
    """Return the kinds of a Qwen model's layers, of full attention or of one window.

    transformers reads `layer_types`, or else gives layers from `max_window_layers` on the window. Raises
    UnsupportedModelError for a layer with a window that the options switch off.
    """
    if not boolean(values, "use_sliding_window", False):
        refuse_sliding_layers(values)
        return ()
    num_layers = integer(values, "num_hidden_layers")
    types = _layer_types(values)
    if types is None:
        first = integer(values, "max_window_layers", _FIRST_WINDOW_LAYER, least=0)
        has_window = [index >= first for index in range(num_layers)]
    else:
        _refuse_types(types, "full_attention", "sliding_attention")
        _check_count(types, values)
        has_window = [kind == "sliding_attention" for kind in types]
    if values.get("sliding_window", _QWEN_WINDOW) is None:
        if types is not None and any(has_window):
            raise UnsupportedModelError(
                "config.json: sliding_window=None must be a positive integer, since layer_types has "
                "'sliding_attention'"
            )
        return ()
    window = integer(values, "sliding_window", _QWEN_WINDOW)
    return tuple(LayerKind(window=window if has else None) for has in has_window)


def written_qwen_kinds(config: ModelConfig) -> dict[str, Any]:
    """Return the options that `qwen_layer_kinds` reads."""
    windows = [kind.window for kind in config.layer_kinds]
    has_window = [window is not None for window in windows]
    if not any(has_window):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": next(filter(None, windows)),
        "max_window_layers": has_window.index(True),  # versions without `layer_types` read it
        "layer_types": ["sliding_attention" if has else "full_attention" for has in has_window],
    }


def gated_weight_map(
    config: ModelConfig, norms: Mapping[str, str] = PLAIN_NORMS, scale: MakeScale = vector
) -> WeightMap:
    """Return the recipes of all parameters of a `GatedDecoder` with plain layers.

    `norms` has the tensor's name of each norm of a layer, and `scale` makes the recipe of a norm's scale from
    the tensor's name and size.
    """
    layer: dict[str, Recipe] = {
        f"{ours}.scale": scale(f"{theirs}.weight", config.hidden_size) for ours, theirs in norms.items()
    }
    return WeightMap(
        outer=token_recipes(config) | {"final_norm.scale": scale("norm.weight", config.hidden_size)},
        layer=attention_recipes(config, "o_proj") | gated_mlp_recipes(config) | layer,
    )
