"""A model as a static structure and a list of arrays, so that programs take the arrays as arguments.

Owns: which arrays a part of a model takes, and the structure of some of its layers.
Does not know: what programs compute.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from model_defs.config import LayerKind
from model_defs.registry import Model, abstract_model

_LAYERS = "layers"


@dataclass(frozen=True)
class ModelStructure:
    """An nnx module without its arrays; hashable, so that equal models share executables.

    Attributes:
      graphdef: structure of the module.
      treedef: structure of its state, whose leaves are the arrays.
      present: indices of the leaves that a part of the model takes.
    """

    graphdef: Any
    treedef: Any
    present: tuple[int, ...]

    @classmethod
    def split(
        cls, model: Model, names: Collection[str] | None = None
    ) -> tuple[ModelStructure, list[jax.Array]]:
        """Return the structure and arrays of `model`, or only of its attributes in `names`."""
        graphdef, state = nnx.split(model)
        paths, treedef = jax.tree.flatten_with_path(state)
        present = [i for i, (path, _) in enumerate(paths) if names is None or path[0].key in names]
        return cls(graphdef, treedef, tuple(present)), [paths[i][1] for i in present]

    @classmethod
    def split_layers(cls, model: Model, layers: range) -> tuple[ModelStructure, list[jax.Array]]:
        """Return the structure and arrays of some layers: a model with as many layers, numbered from 0.

        Other layers of the same kinds in the same order have the same structure.
        """
        structures: dict[LayerKind, Any] = {}
        for layer, kind in zip(model.layers, model.config.kinds, strict=True):
            found = nnx.split(layer)[0]
            assert structures.setdefault(kind, found) == found, "layers differ in more than their kinds"
        arrays = {(path[1].key, path[2:]): leaf for path, leaf in _layer_arrays(model)}
        mesh = next(iter(arrays.values())).sharding.mesh
        short = abstract_model(
            model.config.with_layers(layers),
            dtype=model.compute_dtype.name,
            mesh=mesh,
            weights_dtype=model.weights_dtype,
        )
        structure = cls.split(short, (_LAYERS,))[0]
        return structure, [arrays[layers[path[1].key], path[2:]] for path, _ in _layer_arrays(short)]

    def merge(self, leaves: list[jax.Array]) -> Any:
        """Return the module again, without the arrays left out; free at run time inside a trace."""
        every: list[jax.Array | None] = [None] * self.treedef.num_leaves
        for i, leaf in zip(self.present, leaves, strict=True):
            every[i] = leaf
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, every))


def _layer_arrays(model: Model) -> list[tuple[Any, Any]]:
    """Return every array of the layers (or its placeholder) with its path: `layers`, the number, the rest."""
    paths = jax.tree.flatten_with_path(nnx.split(model)[1])[0]
    return [(path, leaf) for path, leaf in paths if path[0].key == _LAYERS]
