"""What this device can do at most: bytes a second read and copied, operations a second multiplied.

Owns: the programs that find out. Does not know: what is compared with them.
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
    """Of one device.

    Attributes:
      read_bytes_per_s: reading alone.
      copy_bytes_per_s: bytes read plus bytes written.
      flop_per_s: products of matrices, of which a multiply and an add are two.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flop_per_s: float


def measure_ceilings(*, num_bytes: int, matrix_size: int, dtype: str, repeats: int) -> Ceilings:
    """Medians on the first device, of an array of `num_bytes` and of square matrices of `dtype`."""
    num_rows = num_bytes // jnp.dtype(dtype).itemsize // 1024
    array = jax.random.normal(jax.random.key(0), (num_rows, 1024), dtype)
    matrix = jax.random.normal(jax.random.key(1), (matrix_size, matrix_size), dtype)
    read = jax.jit(lambda x: jnp.max(x, axis=1))
    copy = jax.jit(lambda x: x * 2)
    # Float32 is float32 in the models: never the device's TF32.
    multiply = jax.jit(functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST))
    return Ceilings(
        array.nbytes / _seconds(lambda: read(array), repeats),
        2 * array.nbytes / _seconds(lambda: copy(array), repeats),
        2 * matrix_size**3 / _seconds(lambda: multiply(matrix, matrix), repeats),
    )


def _seconds(launch: Callable[[], jax.Array], repeats: int) -> float:
    """A launch of several in a row."""
    timed = Timed(launch, jax.block_until_ready)
    samples = [timed.sample_s(_NUM_LAUNCHES) for _ in range(_NUM_WARM_UPS + repeats)]
    return Spread.of(samples[_NUM_WARM_UPS:]).median
