"""Recipe of each parameter of a config: its Hugging Face tensors, and their assembly.

Owns the look-up by our parameter names; families own the weight maps. All layers of a config share the same
assembly functions, so that each compiles once.
"""

import functools
import re

from model_defs.config import ModelConfig
from model_defs.registry import family
from model_defs.tensor_recipes import Recipe, WeightMap

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def recipe(parameter_name: str, config: ModelConfig) -> Recipe:
    """Return the recipe of `parameter_name` from a checkpoint of `config`."""
    match = _LAYER.fullmatch(parameter_name)
    if match is None:
        return _weight_map(config).outer[parameter_name]
    found, prefix = _weight_map(config).layer[match[2]], family(config.architecture).layer_prefix
    return found._replace(names=tuple(f"{prefix}{match[1]}.{name}" for name in found.names))


@functools.lru_cache(maxsize=4)
def _weight_map(config: ModelConfig) -> WeightMap:
    """Return the cached weight map of a config."""
    return family(config.architecture).weight_map(config)
