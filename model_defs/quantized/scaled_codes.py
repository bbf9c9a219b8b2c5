"""Weights of eight bits with scales: codes [out, in], and a scale for a tensor, channel, group or block.

Owns the decoder and the source that FP8 and compressed-tensors share. Knows neither format's options.
"""

import dataclasses

import jax
import jax.numpy as jnp

from model_defs.quantized.source import Axis, SourcePart, Tensors
from model_defs.quantized.unpacking import (
    e4m3_fault,
    e8m0_fault,
    scaled,
    spread,
    times_power_of_two,
)
from model_defs.safetensors_reader import FLOATS
from model_defs.tensor_recipes import Shape

E4M3, E8M0, INT8 = "F8_E4M3", "F8_E8M0", "I8"


@dataclasses.dataclass(frozen=True)
class ScaledCodes:
    """Decoder of codes [out, in] times scales; `block` is what one scale covers, (1, in) for a channel's.

    Scales are floats, or codes of powers of two (`are_powers`). With a third array, zero points in the layout
    of the scales, these are subtracted first.
    """

    block: tuple[int, int]
    are_powers: bool = False

    def __call__(self, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None = None) -> jax.Array:
        """Return the weight f32[out, in]."""
        wide = self._spread(scales, codes.shape)
        if self.are_powers:
            return times_power_of_two(codes.astype(jnp.float32), wide)
        return scaled(codes, None if zeros is None else self._spread(zeros, codes.shape), wide)

    def _spread(self, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return one value for every code, f[out, in]."""
        grid = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        values = values.reshape(grid)
        for axis in range(2):
            if grid[axis] > 1:
                values = spread(values, self.block[axis], shape[axis], axis)
        return values


def codes_part(name: str, shape: Shape, dtype: str) -> SourcePart:
    """Return the part of the codes themselves."""
    fault = e4m3_fault if dtype == E4M3 else None
    return SourcePart(name, shape, (dtype,), (Axis(0), Axis(1)), fault)


def scale_part(
    name: str,
    shape: Shape,
    block: tuple[int, int],
    tensors: Tensors,
    dtypes: tuple[str, ...] = FLOATS,
) -> SourcePart:
    """Return the part of scales or zero points for blocks of a tensor of `shape`.

    Formats differ in the shape of scales for whole tensors, [] or [1], and for channels, [out] or [out, 1].
    """
    grid = tuple(-(-size // covered) for size, covered in zip(shape, block, strict=True))
    allowed = [grid]
    if grid[1] == 1:
        allowed.append((grid[0],))
    if grid == (1, 1):
        allowed.append(())
    found = tensors[name].shape if name in tensors else grid
    along = tuple(
        None if covered >= size else Axis(axis, covered)
        for axis, (size, covered) in enumerate(zip(shape, block, strict=True))
    )
    stored = found if found in allowed else grid
    return SourcePart(name, stored, dtypes, along, e8m0_fault if is_e8m0(name, tensors) else None)


def is_e8m0(name: str, tensors: Tensors) -> bool:
    """Return whether scales are stored as powers of two."""
    return name in tensors and tensors[name].dtype == E8M0
