"""Weights of four or eight bits in words along the input channels: `pack-quantized` of compressed-tensors.

Owns the decoder and the tensors of the form. Knows no options: a caller gives bits and group.
"""

import dataclasses

import jax
import numpy as np

from model_defs.errors import CheckpointError
from model_defs.quantized.source import Axis, Source, SourcePart, Tensors, present, read_group_index
from model_defs.quantized.unpacking import per_word, scaled, spread, unpack
from model_defs.safetensors_reader import FLOATS, TensorEntry
from model_defs.tensor_recipes import Shape

_UNSET = -1  # group of every channel in files that were made without act order


@dataclasses.dataclass(frozen=True)
class PackedDecoder:
    """Decoder of codes i32[out, in*bits/32] and scales f[out, groups].

    With `has_zeros`, zero points i32[out*bits/32, groups] follow. Codes and zero points are unsigned, with an
    offset of 2**(bits-1). With `has_index`, the last array is g_idx i32[in], the group of each input channel;
    otherwise each `group` channels in order are one.
    """

    bits: int
    group: int
    shape: tuple[int, int]
    has_zeros: bool = False
    has_index: bool = False

    def __call__(self, words: jax.Array, scales: jax.Array, *others: jax.Array) -> jax.Array:
        """Return the weight f32[out, in]."""
        num_out, num_in = self.shape
        offset = 2 ** (self.bits - 1)
        codes = unpack(words, self.bits, 1)[:, :num_in] - offset
        zeros = unpack(others[0], self.bits, 0)[:num_out] - offset if self.has_zeros else None
        index = others[-1] if self.has_index else None
        return scaled(
            codes, None if zeros is None else self._spread(zeros, index), self._spread(scales, index)
        )

    def _spread(self, values: jax.Array, index: jax.Array | None) -> jax.Array:
        """Return one value for every code, [out, in]."""
        if index is not None:
            return values[:, index]
        return spread(values, self.group, self.shape[1], 1)


def packed_source(
    module: str,
    shape: Shape,
    bits: int,
    group: int,
    has_zeros: bool,
    has_act_order: bool,
    tensors: Tensors,
    asked_by: str,
) -> Source:
    """Return the source of the weight [out, in] of `module`, a prefix of tensor names.

    Raises CheckpointError if the checkpoint says that the weight has another shape, names other groups, or
    lacks the groups that act order needs.
    """
    num_out, num_in = shape
    count, groups = per_word(bits), -(-num_in // group)
    named = module + "weight_shape"
    if named in tensors:
        _check_shape(tensors[named], shape)
    packed = tensors.get(module + "weight_packed")
    if packed is not None and has_act_order and groups > 1 and module + "weight_g_idx" not in tensors:
        raise CheckpointError(
            f"tensor {packed.name!r} has no weight_g_idx beside it; actorder='group' needs one"
        )
    index = _group_index(module + "weight_g_idx", num_in, groups, group, tensors)
    # With act order a device may need the scales of any group.
    along = Axis(1, group) if index is None else None
    parts = [
        SourcePart(
            module + "weight_packed", (num_out, -(-num_in // count)), ("I32",), (Axis(0), Axis(1, count))
        ),
        SourcePart(module + "weight_scale", (num_out, groups), FLOATS, (Axis(0), along)),
    ]
    if has_zeros:
        words = -(-num_out // count)
        parts.append(
            SourcePart(module + "weight_zero_point", (words, groups), ("I32",), (Axis(0, count), along))
        )
    if index is not None:
        parts.append(SourcePart(module + "weight_g_idx", (num_in,), ("I32",), (None, Axis(0))))
    decode = PackedDecoder(bits, group, (num_out, num_in), has_zeros, index is not None)
    others = present(tensors, (named, module + "weight_g_idx"))
    return Source(tuple(parts), decode, others, asked_by)


def _check_shape(entry: TensorEntry, shape: Shape) -> None:
    """Raise CheckpointError unless the tensor holds the shape [out, in]."""
    if entry.shape != (2,) or entry.dtype not in ("I32", "I64"):
        raise CheckpointError(
            f"tensor {entry.name!r} in {entry.path.name} is {entry.dtype}{list(entry.shape)}; "
            f"it must be I64[2]"
        )
    found = tuple(int(size) for size in entry.read(("I32", "I64")))
    if found != shape:
        raise CheckpointError(
            f"tensor {entry.name!r} in {entry.path.name} says that the weight has shape {list(found)}, "
            f"the config asks for {list(shape)}"
        )


def _group_index(name: str, num_in: int, groups: int, group: int, tensors: Tensors) -> np.ndarray | None:
    """Read the group of each input channel, i32[in]; None: the groups are in order."""
    entry = tensors.get(name)
    if entry is None:
        return None
    if entry.shape == (num_in,) and entry.dtype == "I32" and (entry.read(("I32",)) == _UNSET).all():
        return None
    index = read_group_index(entry, num_in, groups)
    return None if np.array_equal(index, np.arange(num_in) // group) else index
