"""Tensors of an external model, by name: a state_dict in memory, or safetensors files.

Owns: the sources of tensors, and the check that they match a model's recipes, before any is read.
Does not know: models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from model_defs.errors import CheckpointError
from model_defs.safetensors_reader import open_checkpoint, read_header
from model_defs.tensor_recipes import Recipe

_MAX_NAMES_SHOWN = 8

type TensorSource = Mapping[str, Any] | str | Path
"""Arrays by name (numpy's, or torch's on the host), a safetensors file, or a directory of such files."""


class Tensor(Protocol):
    """Tensor that is read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class _InMemory:
    name: str
    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in np.shape(self.value))

    def read(self) -> np.ndarray:
        try:
            return np.asarray(self.value)
        except (TypeError, RuntimeError) as error:  # torch's errors for bfloat16, other devices and gradients
            raise CheckpointError(
                f"tensor {self.name!r} is not an array in host memory: {error}; use the state_dict of the "
                f"model on the CPU, in float32"
            ) from error


def open_tensors(source: TensorSource) -> dict[str, Tensor]:
    """Return every tensor by its name. Of files only headers are read.

    Raises:
      CheckpointError: there is no such file, or it is damaged.
    """
    if isinstance(source, Mapping):
        return {name: _InMemory(name, value) for name, value in source.items()}
    path = Path(source)
    if path.is_dir():
        return dict(open_checkpoint(path))
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a directory")
    return {entry.name: entry for entry in read_header(path)}


def size_of(tensors: Mapping[str, Tensor], name: str, axis: int, num_dims: int) -> int:
    """Return the length of an axis of a tensor, which determines a size of the model.

    Raises:
      CheckpointError: it is missing or has another number of dimensions.
    """
    if name not in tensors:
        raise CheckpointError(f"tensor {name!r} is missing; there are {_listed(tensors)}")
    shape = tensors[name].shape
    if len(shape) != num_dims:
        raise CheckpointError(f"tensor {name!r} has shape {list(shape)}, {num_dims} dimensions are expected")
    return shape[axis]


def check_tensors(tensors: Mapping[str, Tensor], recipes: Iterable[Recipe]) -> None:
    """Check that the tensors are exactly those of the recipes, in their shapes.

    Raises:
      CheckpointError: a tensor is missing, misshapen or unexpected; the message names it and the shapes.
    """
    wanted = {name: shape for one in recipes for name, shape in zip(one.names, one.shapes, strict=True)}
    missing = wanted.keys() - tensors.keys()
    if missing:
        raise CheckpointError(f"{len(missing)} tensor(s) are missing: {_listed(missing)}")
    for name, shape in wanted.items():
        found = tensors[name].shape
        if found != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(found)}, expected {list(shape)}")
    extra = tensors.keys() - wanted.keys()
    if extra:
        raise CheckpointError(f"{len(extra)} tensor(s) are not part of this model: {_listed(extra)}")


def _listed(names: Iterable[str]) -> str:
    """Format the first few names."""
    shown = sorted(names)
    return ", ".join(repr(name) for name in shown[:_MAX_NAMES_SHOWN]) + (
        ", ..." if len(shown) > _MAX_NAMES_SHOWN else ""
    )
