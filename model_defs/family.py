"""`Family`: the interface of a model family, a row of `registry.FAMILIES`.

Owns the type only. Each module of families makes one; registry collects them; hf_config, hf_recipes,
hf_weights and loading use them. No code outside families compares family names.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from model_defs.config import ModelConfig
from model_defs.decoder import Decoder
from model_defs.layers import Build
from model_defs.tensor_recipes import WeightMap

Values = dict[str, Any]
"""JSON object of config.json or generation_config.json."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Family of models.

    Attributes:
      name: `ModelConfig.architecture`.
      hf_architecture: the only supported name in `architectures`.
      parse: reads config.json and generation_config.json (or None) into a config. Raises
        UnsupportedModelError for an option that would change the arithmetic and is not implemented.
      write: returns the family's own options of config.json for a config, which `parse` reads back.
      make_model: declares the arrays of a config, without values.
      weight_map: returns the recipe of each array from a checkpoint.
      tensor_prefix: prefix of most tensor names of a checkpoint.
      layer_prefix: prefix of the tensors of layers behind it; the number of the layer follows.
      constants: endings of the names of tensors that follow from the config, and are skipped.
      presets: configs by name, of published models and a tiny one.
      model_type: `model_type` in config.json; None means that it is the name.
      has_position_table: whether learned positions limit the context. Otherwise it can be raised.
      window_of_all_layers: whether all layers have the `sliding_window` of a config that was saved before
        there were layer kinds. Otherwise such a config does not say which layers have it.
    """

    name: str
    hf_architecture: str
    parse: Callable[[Values, Values | None], ModelConfig]
    write: Callable[[ModelConfig], Values]
    make_model: Callable[[Build], Decoder]
    weight_map: Callable[[ModelConfig], WeightMap]
    tensor_prefix: str
    presets: dict[str, ModelConfig]
    layer_prefix: str = "layers."
    constants: tuple[str, ...] = ()
    model_type: str | None = None
    has_position_table: bool = False
    window_of_all_layers: bool = False

    @property
    def hf_model_type(self) -> str:
        """Name of the family in config.json, as `model_type`."""
        return self.model_type or self.name
