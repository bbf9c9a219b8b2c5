"""Sources of the tensors that recipes name: one tensor as it is, or a decoder over several.

Owns what a source says of its tensors in a file: names, shapes, dtypes, and which of their axes may be split
over devices. Knows no format, and reads no weights.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec

from model_defs.errors import CheckpointError
from model_defs.safetensors_reader import FLOATS, TensorEntry
from model_defs.sharding import TENSOR_AXIS
from model_defs.tensor_recipes import Shape

type Tensors = Mapping[str, TensorEntry]
"""Tensors of a checkpoint by their names without prefix."""


class Axis(NamedTuple):
    """Axis number `place` of a stored tensor; each of its indices holds `span` decoded elements."""

    place: int
    span: int = 1


@dataclasses.dataclass(frozen=True)
class SourcePart:
    """One stored tensor of a source.

    Attributes:
      name: its name without prefix.
      shape: the shape that it must have.
      dtypes: the dtypes that it may have, as in safetensors.
      axes: for each axis of the decoded tensor the stored axis along it; None: the tensor has none.
      fault: describes values that have no meaning; None: the values are good.
    """

    name: str
    shape: Shape
    dtypes: tuple[str, ...]
    axes: tuple[Axis | None, ...]
    fault: Callable[[np.ndarray], str | None] | None = None


class Source(NamedTuple):
    """Stored tensors that give one tensor of a recipe, and the function that decodes them.

    `decode` takes the parts as arrays and returns float32 in the shape that the recipe asks for; None: the
    only part is the tensor. Equal decoders compile once. `others` are tensors that need not be copied: their
    values were checked, or they concern activations alone. `asked_by` names in errors what determines shapes.
    """

    parts: tuple[SourcePart, ...]
    decode: Callable[..., jax.Array] | None = None
    others: tuple[str, ...] = ()
    asked_by: str = "the config"

    def specs(self, shape: Shape, axis: int | None, num_devices: int) -> list[PartitionSpec]:
        """Return the partition of each part if the decoded tensor of `shape` is to be split along `axis`.

        Parts are split only where every device gets whole indices of each. Otherwise all of them are whole on
        every device, which decodes what it needs.
        """
        if axis is None:
            return [PartitionSpec()] * len(self.parts)
        along = [part.axes[axis] for part in self.parts]
        if any(one is not None and shape[axis] % (one.span * num_devices) for one in along):
            return [PartitionSpec()] * len(self.parts)
        return [
            PartitionSpec() if one is None else PartitionSpec(*[None] * one.place, TENSOR_AXIS)
            for one in along
        ]

    def section(self, axis: int, begin: int, end: int) -> "Source":
        """Return the source of the indices from `begin` to `end` along `axis` of what this one decodes."""
        assert self.decode is not None
        # They need not end at groups or words, so every device decodes from whole parts.
        parts = tuple(dataclasses.replace(part, axes=(None,) * len(part.axes)) for part in self.parts)
        return self._replace(parts=parts, decode=SectionDecoder(self.decode, axis, begin, end))


@dataclasses.dataclass(frozen=True)
class SectionDecoder:
    """Decoder of the indices from `begin` to `end` along `axis` of what `whole` decodes."""

    whole: Callable[..., jax.Array]
    axis: int
    begin: int
    end: int

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """Return the section, in float32."""
        return jax.lax.slice_in_dim(self.whole(*arrays), self.begin, self.end, axis=self.axis)


class QuantizedFormat(Protocol):
    """Format of a quantized checkpoint, with its options."""

    @property
    def name(self) -> str: ...

    def digest(self) -> str:
        """Return what a fingerprint says of the format: all options that change what is decoded."""
        ...

    def source(self, name: str, shape: Shape, tensors: Tensors) -> Source | None:
        """Return the source of the tensor that a recipe calls `name`; None: it is stored as it is.

        Raises CheckpointError or UnsupportedModelError if tensors and options contradict each other.
        """
        ...


def plain(name: str, shape: Shape) -> Source:
    """Return the source of a tensor that is stored as it is."""
    axes = tuple(Axis(index) for index in range(len(shape)))
    return Source((SourcePart(name, shape, FLOATS, axes),))


def check_packs(entry: TensorEntry, sizes: dict[str, int], unit: int) -> None:
    """Raise CheckpointError unless each size is a multiple of `unit`, which one stored element holds."""
    for what, size in sizes.items():
        if size % unit:
            raise CheckpointError(
                f"tensor {entry.name!r} in {entry.path.name} holds {unit} {what} in each element, but the "
                f"config asks for {size}, which is not a multiple; the checkpoint belongs to another config"
            )


def read_group_index(entry: TensorEntry, num_in: int, groups: int) -> np.ndarray:
    """Read i32[in], the group of each input channel; raise CheckpointError if it is of another kind."""
    if entry.shape != (num_in,) or entry.dtype not in ("I32", "I64"):
        raise CheckpointError(
            f"tensor {entry.name!r} in {entry.path.name} is {entry.dtype}{list(entry.shape)}; "
            f"it must be I32[{num_in}], a group for each input channel"
        )
    index = entry.read(("I32", "I64"))
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise CheckpointError(
            f"tensor {entry.name!r} in {entry.path.name} names groups {index.min()} to {index.max()}; "
            f"there are {groups}, from 0"
        )
    return index


def present(tensors: Tensors, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` that the checkpoint has."""
    return tuple(name for name in names if name in tensors)
