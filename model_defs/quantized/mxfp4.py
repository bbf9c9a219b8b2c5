"""MXFP4 (gpt-oss): experts in e2m1, 32 values of an input dimension to a scale, which is a power of two.

Owns the options and the tensors of the format. An experts' tensor `X` of a recipe is stored as `X_blocks` and
`X_scales`; everything else in such a checkpoint is plain.
"""

import dataclasses

import jax
import jax.numpy as jnp

from model_defs.quantized.options import Options
from model_defs.quantized.source import Axis, Source, SourcePart, Tensors, check_packs
from model_defs.quantized.unpacking import e8m0_fault, times_power_of_two
from model_defs.tensor_recipes import Shape

_GROUP, _GROUP_BYTES = 32, 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-one for one in _MAGNITUDES))
"""Values of the codes of e2m1; the highest bit is the sign."""


@dataclasses.dataclass(frozen=True)
class Mxfp4Decoder:
    """Decoder of blocks u8[experts, out, groups, 16] and scales u8[experts, out, groups].

    A byte holds two codes, the first in its low half.
    """

    def __call__(self, blocks: jax.Array, scales: jax.Array) -> jax.Array:
        """Return f32[experts, in, out]."""
        codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], _GROUP)
        values = times_power_of_two(jnp.array(VALUES, jnp.float32)[codes], scales[..., None])
        return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """MXFP4 weights of experts, as gpt-oss publishes them."""

    name = "MXFP4"

    def digest(self) -> str:
        return "mxfp4"

    def source(self, name: str, shape: Shape, tensors: Tensors) -> Source | None:
        if name + "_blocks" not in tensors or len(shape) != 3:
            return None
        experts, num_in, num_out = shape
        check_packs(tensors[name + "_blocks"], {"input channels": num_in}, _GROUP)
        groups = num_in // _GROUP
        axes = (Axis(0), Axis(2, _GROUP), Axis(1))
        parts = (
            SourcePart(name + "_blocks", (experts, num_out, groups, _GROUP_BYTES), ("U8",), axes),
            SourcePart(name + "_scales", (experts, num_out, groups), ("U8",), axes, e8m0_fault),
        )
        return Source(parts, Mxfp4Decoder(), asked_by=self.name)


def parse_mxfp4(options: Options) -> Mxfp4:
    """Read the options of an MXFP4 checkpoint."""
    options.without_effect("quant_method", "modules_to_not_convert", "dequantize")
    options.close()
    return Mxfp4()
