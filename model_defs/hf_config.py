"""Reading of ModelConfig from model directories (config.json or our own file), and writing of config.json.

Owns the choice of the family, and the options that no family supports. Each family defines its options, their
defaults, and the rejected ones: an option that changes the arithmetic is never ignored. Knows nothing of
weights.
"""

import dataclasses
from pathlib import Path
from typing import Any

from model_defs.config import MODEL_CONFIG_FILE, ModelConfig, read_json, read_saved
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.hf_options import written_common_fields
from model_defs.multimodal import MULTIMODAL, text_half
from model_defs.other_formats import refuse_other_formats
from model_defs.quantized import parse_format, read_format
from model_defs.registry import FAMILIES, family

_OF_RANDOM_WEIGHTS = ("initializer_range", "initial_norm_scale")


def load_config(directory: str | Path, max_position_embeddings: int | None = None) -> ModelConfig:
    """Read the config of a converted (Orbax) or Hugging Face directory, for the given context, if any.

    Raises CheckpointError if the file is missing, not JSON or lacks a key, and UnsupportedModelError if the
    architecture or an option of it is not implemented.
    """
    root = Path(directory)
    if (root / MODEL_CONFIG_FILE).is_file():
        return _saved_config(root).with_context(max_position_embeddings)
    refuse_other_formats(root)
    read_format(root)  # raises for a quantized format that is not supported
    generation = root / "generation_config.json"
    values = read_json(generation) if generation.is_file() else None
    return parse_hf_config(read_json(root / "config.json"), values).with_context(max_position_embeddings)


def _saved_config(root: Path) -> ModelConfig:
    """Read the config of a converted directory."""
    values = read_saved(root)["config"]
    config = ModelConfig.from_json(values)
    found = family(config.architecture)  # raises for an architecture of a later version
    window = values.get("sliding_window")
    if window is not None and not found.window_of_all_layers:
        raise UnsupportedModelError(
            f"{root / MODEL_CONFIG_FILE}: sliding_window={window!r} does not say which layers have it; "
            f"convert the model again"
        )
    return config


def parse_hf_config(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Build a ModelConfig from the JSON objects of config.json and, if present, generation_config.json.

    Raises UnsupportedModelError, which names the architecture, option or missing field.
    """
    half = text_half(values)
    found = _family(half)
    parse_format(values)  # raises for a quantized format that is not supported
    return found.parse(half, generation)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the JSON object of config.json that `parse_hf_config` reads back as `config`.

    Fields for random weights are not written. Raises UnsupportedModelError, which names the fields that would
    be lost.
    """
    found = family(config.architecture)
    written = {"architectures": [found.hf_architecture], "model_type": found.hf_model_type}
    written |= written_common_fields(config) | found.write(config)
    read = found.parse(written, None)
    lost = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in _OF_RANDOM_WEIGHTS and getattr(read, field.name) != getattr(config, field.name)
    ]
    if lost:
        raise UnsupportedModelError(
            f"{', '.join(f'{name}={getattr(config, name)!r}' for name in lost)} cannot be written to a "
            f"config.json of {found.hf_architecture}"
        )
    return written


def _family(values: dict[str, Any]) -> Family:
    """Return the family of `architectures`, or of `model_type` if that is missing."""
    names = values.get("architectures")
    names = [] if names is None else names
    model_type = values.get("model_type")
    if not isinstance(names, list) or not isinstance(model_type, str | None):
        found = []  # with a string instead of a list, `in` below would match substrings
    elif names:
        found = [row for row in FAMILIES.values() if row.hf_architecture in names]
        found = [row for row in found if model_type in (None, row.hf_model_type)] if len(found) == 1 else []
    else:
        found = [row for row in FAMILIES.values() if row.hf_model_type == model_type]
    if found:
        return found[0]
    if values.get("kv_lora_rank") is not None:
        raise UnsupportedModelError(
            f"architectures={names!r}: multi-head latent attention (MLA, kv_lora_rank="
            f"{values['kv_lora_rank']!r}) is not supported; docs/limits.md says what it would need"
        )
    raise UnsupportedModelError(
        f"architectures={names!r}, model_type={model_type!r} is not supported; "
        f"supported: {', '.join([*(row.hf_architecture for row in FAMILIES.values()), *MULTIMODAL])}"
    )
