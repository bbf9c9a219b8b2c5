"""What a model family is to everything that is not that family: the fields of a row in `registry.FAMILIES`.

Owns the value only. A family's module in families makes one; registry collects them; hf_config, hf_recipes,
hf_weights and loading ask them. Nothing outside families compares a family's name with anything.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from model_defs.config import ModelConfig
from model_defs.decoder import Decoder
from model_defs.layers import Build
from model_defs.tensor_recipes import WeightMap

Values = dict[str, Any]
"""A JSON object: config.json or generation_config.json."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
      name: `ModelConfig.architecture`, and `model_type` in config.json.
      hf_architecture: the one name in `architectures` that is understood.
      parse: config.json and, if there, generation_config.json -> the config. Raises UnsupportedModelError
        for an option that would change the arithmetic and is not implemented.
      write: a config -> what only this family has in config.json, so that `parse` finds it again.
      make_model: declares the arrays of a config; no value exists yet.
      weight_map: where each of them comes from in a checkpoint.
      tensor_prefix: what stands before most tensor names of a checkpoint.
      presets: configs by name, of published models and a tiny one.
      has_position_table: whether learned positions bound the context; else it can be raised.
    """

    name: str
    hf_architecture: str
    parse: Callable[[Values, Values | None], ModelConfig]
    write: Callable[[ModelConfig], Values]
    make_model: Callable[[Build], Decoder]
    weight_map: Callable[[ModelConfig], WeightMap]
    tensor_prefix: str
    presets: dict[str, ModelConfig]
    has_position_table: bool = False
