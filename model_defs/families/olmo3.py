"""OLMo 3: the layer of OLMo 2; three of four layers have a window.

Owns the family's config.json, weight map and presets. Frequencies that are stretched for long contexts are
those of layers without a window. The chat template is ChatML with a system message, and continues a
conversation unchanged.
"""

import functools
from typing import Any

from model_defs.config import LayerKind, ModelConfig, RopeConfig
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.gated_checkpoints import TENSOR_PREFIX, Defaults, parse_gated, written_gated
from model_defs.gated_decoder import GatedDecoder
from model_defs.hf_layer_types import layer_windows, written_windows
from model_defs.hf_options import boolean, integer, number
from model_defs.hf_rope import parse_rope, parse_ropes_by_type, written_ropes_by_type
from model_defs.layers import Build
from model_defs.olmo_layer import OlmoLayer, olmo_weight_map
from model_defs.tiny_preset import tiny_preset

_MAX_POSITIONS, _THETA = 2048, 5e5
_DEFAULTS = Defaults(max_positions=_MAX_POSITIONS, eos=50279, norm_eps=1e-5)


def _kinds(windows: tuple[int | None, ...], num_ropes: int) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(window, rope=0 if window is None else num_ropes - 1) for window in windows)


_PRESETS = {
    "olmo3-7b": ModelConfig(
        architecture="olmo3",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=100278,
        max_position_embeddings=65536,
        eos_token_ids=(100257,),
        norm_eps=1e-6,
        ropes=(
            RopeConfig("yarn", _THETA, 8.0, 8192, attention_factor=1.2079441541679836),
            RopeConfig(theta=_THETA),
        ),
        layer_kinds=_kinds((4096, 4096, 4096, None) * 8, 2),
    ),
    "olmo3-tiny": tiny_preset("olmo3", ropes=(RopeConfig(theta=_THETA),), layer_kinds=_kinds((24, None), 1)),
}


def _parse(values: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    windows = layer_windows(values, period=4, window=4096)
    full, sliding = _ropes(values)
    ropes = (full,) if full == sliding else (full, sliding)
    return parse_gated(
        "olmo3",
        values,
        generation,
        _DEFAULTS,
        attention_bias=boolean(values, "attention_bias", False),
        ropes=ropes,
        layer_kinds=_kinds(windows, len(ropes)),
    )


def _ropes(values: dict[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Read the rope of layers that see all tokens, and that of layers with a window."""
    max_positions = integer(values, "max_position_embeddings", _MAX_POSITIONS)
    if values.get("rope_parameters") is not None:
        ropes = parse_ropes_by_type(values, max_positions, _THETA, _THETA)
    else:
        ropes = (parse_rope(values, max_positions, _THETA), RopeConfig(theta=_THETA))
    if values.get("rope_theta") is not None:
        theta = number(values, "rope_theta", above=1)
        if any(rope.theta != theta for rope in ropes):
            raise UnsupportedModelError(
                f"rope_theta={values['rope_theta']!r} is not supported: versions of transformers differ in "
                f"which layers have it; remove it, and write rope_parameters with a rope_theta for each type "
                f"of layer"
            )
    return ropes


def _write(config: ModelConfig) -> dict[str, Any]:
    written = written_gated(config) | written_windows(config) | {"attention_bias": config.attention_bias}
    full, sliding = config.ropes[0], config.ropes[-1]
    if full.theta == _THETA and sliding == RopeConfig(theta=_THETA):
        return written  # which transformers 4 reads, too
    left_out = ("rope_theta", "rope_scaling")
    written = {name: value for name, value in written.items() if name not in left_out}
    return written | written_ropes_by_type(full, sliding)


def _make_model(build: Build) -> GatedDecoder:
    return GatedDecoder(build, functools.partial(OlmoLayer, build))


FAMILY = Family(
    name="olmo3",
    hf_architecture="Olmo3ForCausalLM",
    parse=_parse,
    write=_write,
    make_model=_make_model,
    weight_map=olmo_weight_map,
    tensor_prefix=TENSOR_PREFIX,
    presets=_PRESETS,
)
