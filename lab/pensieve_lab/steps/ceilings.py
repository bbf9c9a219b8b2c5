"""Measured ceilings of this device: bytes/s read and copied, and floating-point operations/s.

Owns: the programs that measure them. Does not know: what is compared with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pensieve_jax.device.row_steps import Timed
from pensieve_lab.common.spread import Spread

_NUM_LAUNCHES = 16
_NUM_WARM_UPS = 2


class Ceilings(NamedTuple):
    """Ceilings of one device.

    Attributes:
      read_bytes_per_s: bandwidth of reading alone.
      copy_bytes_per_s: bandwidth of a copy, bytes read plus bytes written.
      flop_per_s: rate of matrix products, where a multiply and an add count as two.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flop_per_s: float


def measure_ceilings(*, num_bytes: int, matrix_size: int, dtype: str, repeats: int) -> Ceilings:
    """Measure medians on the first device, with an array of `num_bytes` and square matrices of `dtype`."""
    num_rows = num_bytes // jnp.dtype(dtype).itemsize // 1024
    array = jax.random.normal(jax.random.key(0), (num_rows, 1024), dtype)
    matrix = jax.random.normal(jax.random.key(1), (matrix_size, matrix_size), dtype)
    read = jax.jit(lambda x: jnp.max(x, axis=1))
    copy = jax.jit(lambda x: x * 2)
    # The models compute float32 exactly, so the device's TF32 is not allowed here either.
    multiply = jax.jit(functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST))
    return Ceilings(
        array.nbytes / _seconds(lambda: read(array), repeats),
        2 * array.nbytes / _seconds(lambda: copy(array), repeats),
        2 * matrix_size**3 / _seconds(lambda: multiply(matrix, matrix), repeats),
    )


def _seconds(launch: Callable[[], jax.Array], repeats: int) -> float:
    """Return the median seconds per launch, of several launches in a row."""
    timed = Timed(launch, jax.block_until_ready)
    samples = [timed.sample_s(_NUM_LAUNCHES) for _ in range(_NUM_WARM_UPS + repeats)]
    return Spread.of(samples[_NUM_WARM_UPS:]).median
