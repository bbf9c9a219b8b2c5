"""A model as a static structure and a list of arrays, so that programs take the arrays as arguments.

Owns: which arrays a part of a model takes, and the structure of some of its layers.
Does not know: what programs compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from model_defs.registry import Model, abstract_model

_LAYERS = "layers"


@dataclass(frozen=True)
class ModelStructure:
    """An nnx module without its arrays; hashable, so that equal models share executables.

    Attributes:
      graphdef: the module's structure.
      treedef: of its state; the leaves are the arrays.
      present: which of them a part of the model takes, by number.
    """

    graphdef: Any
    treedef: Any
    present: tuple[int, ...]

    @classmethod
    def split(
        cls, model: Model, names: Collection[str] | None = None
    ) -> tuple[ModelStructure, list[jax.Array]]:
        """The structure and the arrays of `model`, or of its attributes of those names alone."""
        graphdef, state = nnx.split(model)
        paths, treedef = jax.tree.flatten_with_path(state)
        present = [i for i, (path, _) in enumerate(paths) if names is None or path[0].key in names]
        return cls(graphdef, treedef, tuple(present)), [paths[i][1] for i in present]

    @classmethod
    def split_layers(cls, model: Model, layers: range) -> tuple[ModelStructure, list[jax.Array]]:
        """Of some layers alone: the structure of a model that has as many, in which the first is number 0.

        So it is the same for as many others, and a model's layers have to be of one kind.
        """
        kinds = {nnx.split(layer)[0] for layer in model.layers}
        assert len(kinds) == 1, "layers differ in more than their numbers"
        arrays = {(path[1].key, path[2:]): leaf for path, leaf in _layer_arrays(model)}
        some = next(iter(arrays.values()))
        config = dataclasses.replace(model.config, num_layers=len(layers))
        short = abstract_model(config, dtype=some.dtype.name, mesh=some.sharding.mesh)
        structure = cls.split(short, (_LAYERS,))[0]
        return structure, [arrays[layers[path[1].key], path[2:]] for path, _ in _layer_arrays(short)]

    def merge(self, leaves: list[jax.Array]) -> Any:
        """A module again, less the arrays it did not take; inside a trace this costs nothing at run time."""
        every: list[jax.Array | None] = [None] * self.treedef.num_leaves
        for i, leaf in zip(self.present, leaves, strict=True):
            every[i] = leaf
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, every))


def _layer_arrays(model: Model) -> list[tuple[Any, Any]]:
    """Every array of a layer, or what stands for it, with its path: `layers`, the number, and the rest."""
    paths = jax.tree.flatten_with_path(nnx.split(model)[1])[0]
    return [(path, leaf) for path, leaf in paths if path[0].key == _LAYERS]
