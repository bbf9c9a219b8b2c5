"""Model directories -> ModelConfig: config.json of any family, or our own file; and a config -> config.json.

Owns which family a config.json is of, and what no family supports. Which options are understood, which
defaults missing ones have and which are refused by name is the families': an option that changes the
arithmetic is never ignored. Knows nothing of weights.
"""

import dataclasses
from pathlib import Path
from typing import Any

from model_defs.config import MODEL_CONFIG_FILE, ModelConfig, read_json, read_saved
from model_defs.errors import UnsupportedModelError
from model_defs.family import Family
from model_defs.hf_options import written_common_fields
from model_defs.registry import FAMILIES, family

_OF_RANDOM_WEIGHTS = ("initializer_range", "initial_norm_scale")


def load_config(directory: str | Path) -> ModelConfig:
    """Read the config of a converted (Orbax) or Hugging Face directory.

    Raises CheckpointError when there is none, it is not JSON or lacks a key, UnsupportedModelError when the
    architecture or an option of it is not implemented.
    """
    root = Path(directory)
    if (root / MODEL_CONFIG_FILE).is_file():
        config = ModelConfig.from_json(read_saved(root)["config"])
        family(config.architecture)  # one of a later version is refused here
        return config
    generation = root / "generation_config.json"
    return parse_hf_config(
        read_json(root / "config.json"), read_json(generation) if generation.is_file() else None
    )


def parse_hf_config(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Build a ModelConfig from the JSON objects of config.json and, when present, generation_config.json.

    Raises UnsupportedModelError that names the architecture, option or missing field.
    """
    found = _family(values)
    if values.get("quantization_config"):
        raise UnsupportedModelError("quantization_config: quantized checkpoints are not supported")
    return found.parse(values, generation)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The JSON object of config.json that `parse_hf_config` reads back as `config`.

    What belongs to random weights is not in it. Raises UnsupportedModelError naming the fields that would be
    lost.
    """
    found = family(config.architecture)
    written = {"architectures": [found.hf_architecture], "model_type": found.name}
    written |= written_common_fields(config) | found.write(config)
    read = found.parse(written, None)
    lost = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in _OF_RANDOM_WEIGHTS and getattr(read, field.name) != getattr(config, field.name)
    ]
    if lost:
        raise UnsupportedModelError(
            f"{', '.join(f'{name}={getattr(config, name)!r}' for name in lost)} cannot be said in a "
            f"config.json of {found.hf_architecture}"
        )
    return written


def _family(values: dict[str, Any]) -> Family:
    """From `architectures`, or from `model_type` where that is missing."""
    names = values.get("architectures") or []
    model_type = values.get("model_type")
    if not isinstance(names, list) or not isinstance(model_type, str | None):
        found = []  # a name in place of a list of names would match a part of it
    elif names:
        found = [row for row in FAMILIES.values() if row.hf_architecture in names]
        found = [row for row in found if model_type in (None, row.name)] if len(found) == 1 else []
    else:
        found = [row for row in FAMILIES.values() if row.name == model_type]
    if found:
        return found[0]
    raise UnsupportedModelError(
        f"architectures={names!r}, model_type={model_type!r} is not supported; "
        f"supported: {', '.join(row.hf_architecture for row in FAMILIES.values())}"
    )
