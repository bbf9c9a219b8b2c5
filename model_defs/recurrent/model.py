"""Base of all models of this package: a config, and parameters that are random, imported or restored.

Owns: the filling of an abstract model, and the metadata of a saved one.
Does not know: any architecture.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_defs.config import DTYPES, read_saved
from model_defs.errors import CheckpointError, UnsupportedModelError
from model_defs.orbax_store import restore_parameters, save_arrays
from model_defs.parameters import Parameter, fill_parameters, named_parameters
from model_defs.random_weights import draw
from model_defs.recurrent.tensors import Tensor, check_tensors
from model_defs.tensor_recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Sizes of a model, which must be positive, and the dtype that it runs in.

    Fields that end in `_id`, and `num_classes`, may be 0.
    """

    architecture: ClassVar[str]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for invalid sizes or dtypes."""
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            least = 0 if one.name.endswith("_id") or one.name == "num_classes" else 1
            if str(one.type) == "int" and (type(value) is not int or value < least):
                raise UnsupportedModelError(f"{one.name}={value!r} must be an int of at least {least}")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the architecture."""
        return dataclasses.asdict(self) | {"architecture": self.architecture}


class RecurrentModel[C: RecurrentConfig](nnx.Module):
    """Model whose arrays have no values until it is filled.

    Attributes:
      config: configuration of the model.
    """

    config_class: ClassVar[type[RecurrentConfig]]
    config: C

    def __init__(self, config: C) -> None:
        """Store the config. Subclasses declare the arrays."""
        self.config = config

    @classmethod
    def load(cls, directory: str | Path, *, dtype: str = "auto") -> Self:
        """Load a model that `save` wrote; dtype "auto" is the saved one.

        Raises:
          CheckpointError: it is another architecture, or files are missing, damaged or of other shapes.
        """
        values = dict(read_saved(Path(directory))["config"])
        found = values.pop("architecture", None)
        expected = cls.config_class.architecture
        if found != expected:
            raise CheckpointError(f"{directory} holds a model of {found!r}, not of {expected!r}")
        if dtype != "auto":
            values["dtype"] = dtype
        try:
            config: Any = cls.config_class(**values)
        except TypeError as error:
            raise CheckpointError(f"{directory} is of another version: {error}") from error
        model = cls(config)
        restore_parameters(model, directory)
        return model

    def save(self, directory: str | Path) -> None:
        """Write the model to a directory that holds no model yet.

        Raises:
          CheckpointError: the directory holds a model.
        """
        config = self.config.to_json() | {"dtype": next(named_parameters(self))[1].get_value().dtype.name}
        save_arrays(self, directory, config=config, weights_digest=_digest(self))

    def _fill_randomly(self, seed: int) -> Self:
        """Fill with values that depend only on seed, name and index."""

        def fill(name: str, parameter: Parameter) -> jax.Array:
            scale, constant = (parameter.get_metadata(key) for key in ("scale", "constant"))
            return draw(f"{seed}:{name}", parameter.get_value(), scale, constant=constant)

        fill_parameters(self, fill)
        return self

    def _fill_from(self, tensors: Mapping[str, Tensor], recipes: Mapping[str, Recipe]) -> Self:
        """Make every parameter from the tensors that its recipe names.

        Raises:
          CheckpointError: a tensor is missing, misshapen, or not part of this model.
        """
        check_tensors(tensors, recipes.values())

        def fill(name: str, parameter: Parameter) -> jax.Array:
            target: Any = parameter.get_value()  # still a ShapeDtypeStruct
            recipe = recipes[name]
            parts = [jnp.asarray(np.asarray(tensors[one].read(), np.float32)) for one in recipe.names]
            value = parts[0] if recipe.assemble is None else recipe.assemble(*parts)
            return jax.device_put(value.astype(target.dtype), target.sharding)

        fill_parameters(self, fill)
        return self


def _digest(model: nnx.Module) -> str:
    """Return the SHA-256 of all names and values."""
    digest = hashlib.sha256()
    for name, parameter in named_parameters(model):
        digest.update(name.encode())
        digest.update(np.asarray(parameter.get_value()).tobytes())
    return digest.hexdigest()
