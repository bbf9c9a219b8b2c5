"""Rotary position embeddings: frequencies of each supported kind, and their application.

Only kinds whose frequencies do not depend on the current length are supported, since keys are cached with
their rotation. Frequencies are NumPy constants, computed once per model. cos and sin are computed once per
step from the positions, and shared by all layers that rotate alike.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model_defs.config import RopeConfig

CosSin = tuple[jax.Array, jax.Array]
"""cos and sin of a step's positions, f32[T, 1, rotary_dim / 2] each."""


class Rotation(NamedTuple):
    """cos and sin that queries and keys are rotated with. They differ where queries grow with positions."""

    queries: CosSin
    keys: CosSin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return f32[rotary_dim / 2], radians per position of each pair of dimensions.

    `rope` is that of the served context (`RopeConfig.in_context`), which chooses longrope's factors.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        plain = _llama3(plain, rope)
    elif rope.kind == "yarn":
        plain = _yarn(plain, rope, rotary_dim)
    elif rope.kind == "longrope":
        assert not (rope.short_factors and rope.long_factors), "longrope of no context"
        plain = plain / np.array(rope.short_factors or rope.long_factors)
    return plain.astype(np.float32)


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Keep fast dimensions, stretch slow ones by `factor`, and interpolate between them."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)  # full turns over the old context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / rope.factor


def _yarn(frequencies: np.ndarray, rope: RopeConfig, rotary_dim: int) -> np.ndarray:
    """Scale as `_llama3`, but interpolate linearly in the dimension index between two turn counts."""

    def dimension_of(num_turns: float) -> float:
        wavelengths = rope.original_max_positions / (num_turns * 2 * math.pi)
        return rotary_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    stretch = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    return stretch * frequencies / rope.factor + (1.0 - stretch) * frequencies


def cos_sin(positions: jax.Array, frequencies: np.ndarray, attention_factor: float) -> CosSin:
    """Return cos and sin, f32[T, 1, rotary_dim / 2], times `attention_factor`, for `positions` i32[T]."""
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rotation(positions: jax.Array, rope: RopeConfig, head_dim: int) -> Rotation:
    """Return the rotation of `positions` i32[T] by an embedding of the served context."""
    cos, sin = keys = cos_sin(positions, inverse_frequencies(rope, head_dim), rope.attention_factor)
    if rope.query_growth is None:
        return Rotation(keys, keys)
    periods = (positions // rope.original_max_positions).astype(jnp.float32)[:, None, None]
    scale = 1 + rope.query_growth * jnp.log1p(periods)
    return Rotation((cos * scale, sin * scale), keys)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate `x` [T, heads, head_dim]: dimension i pairs with i + rotary_dim / 2. Computed in float32.

    Elements of a head behind the rotated ones stay.
    """
    rotary_dim = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :rotary_dim].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    if rotary_dim == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)
