"""Weights kept in 8 bits: formats, and the codes and scales of an array of weights.

Owns: the names of the formats, and how weights become codes. A format is symmetric, with one float32 scale
for each output of a projection: weight = code * scale. Codes lie as [*out_shape, *in_shape], as checkpoints
have them and products read them; weights in 16 or 32 bits are [*in_shape, *out_shape].
Does not know: which weights of a model are kept so (`layers` does), checkpoints, or products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model_defs.errors import UnsupportedModelError


class WeightFormat(NamedTuple):
    """Format of codes.

    Attributes:
      dtype: dtype of the codes.
      largest: the code of the largest weight of an output.
    """

    dtype: jnp.dtype
    largest: float


FORMATS = {
    "int8": WeightFormat(jnp.dtype(jnp.int8), 127.0),
    "fp8": WeightFormat(jnp.dtype(jnp.float8_e4m3fn), 448.0),
}
"""All formats, by the name that `weights_dtype` has."""


class Kept(NamedTuple):
    """How the array of a parameter is made of weights, in the metadata of kernel and scale.

    Attributes:
      weights_dtype: a key of `FORMATS`.
      num_in_dims: leading dimensions of the weights, which are summed over.
      plain: shape, dtype and sharding of the weights, [*in_shape, *out_shape].
    """

    weights_dtype: str
    num_in_dims: int
    plain: jax.ShapeDtypeStruct

    @property
    def format(self) -> WeightFormat:
        """The format; raises UnsupportedModelError for an unknown one."""
        return weight_format(self.weights_dtype)


def weight_format(weights_dtype: str) -> WeightFormat:
    """Return the format of that name; raise UnsupportedModelError, which lists the known ones."""
    if weights_dtype not in FORMATS:
        raise UnsupportedModelError(f"weights_dtype={weights_dtype!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[weights_dtype]


def encoder(kept: Kept, shardings: tuple[Any, Any]) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return the jitted function from weights [*in_shape, *out_shape] to codes and scales, in `shardings`."""
    return _encoder(kept.weights_dtype, kept.num_in_dims, shardings)


@functools.lru_cache(maxsize=64)
def _encoder(
    weights_dtype: str, num_in_dims: int, shardings: tuple[Any, Any]
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    run = functools.partial(encode, weights_dtype=weights_dtype, num_in_dims=num_in_dims)
    return jax.jit(run, out_shardings=shardings)


def encode(weights: jax.Array, *, weights_dtype: str, num_in_dims: int) -> tuple[jax.Array, jax.Array]:
    """Return codes [*out_shape, *in_shape] and scales f32[*out_shape] of weights [*in_shape, *out_shape].

    The largest weight of an output has the largest code; an output of zeros has the scale 1. An output with a
    weight that is not finite has the scale NaN or infinity, so its products are not finite either.
    """
    dtype, largest = weight_format(weights_dtype)
    ins, outs = range(num_in_dims), range(num_in_dims, weights.ndim)
    wide = jnp.transpose(weights, (*outs, *ins)).astype(jnp.float32)
    inputs = tuple(range(len(outs), wide.ndim))
    most = jnp.max(jnp.abs(wide), axis=inputs)
    # Of a constant, since XLA may divide by multiplying with an inverse.
    scale = jnp.where(most == 0, 1.0, most * np.float32(1 / largest)).astype(jnp.float32)
    scaled = jnp.clip(wide / jnp.expand_dims(scale, inputs), -largest, largest)
    codes = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
    return codes.astype(dtype), scale


def decode(codes: jax.Array, scale: jax.Array, *, num_in_dims: int, dtype: Any) -> jax.Array:
    """Return the weights [*in_shape, *out_shape] that codes and scales stand for, rounded to `dtype`."""
    num_outs = codes.ndim - num_in_dims
    wide = codes.astype(jnp.float32) * jnp.expand_dims(scale, tuple(range(num_outs, codes.ndim)))
    order = (*range(num_outs, codes.ndim), *range(num_outs))
    return jnp.transpose(wide, order).astype(dtype)
