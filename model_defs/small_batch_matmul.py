"""Who multiplies the few rows of a decode step with a layer's weights.

Owns: the choice, which whoever traces a step makes for what is traced inside `multiplying_by`; without one it
is XLA's, which is asked in `layers`. Does not know: kernels, models, or how arrays lie on devices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from pallas_kernels import decode_matmul

Product = Callable[..., jax.Array]
XLA = "xla"
_backend: ContextVar[str] = ContextVar("few_rows", default=XLA)


@contextlib.contextmanager
def multiplying_by(backend: str) -> Iterator[None]:
    """What is traced meanwhile takes this back end of `decode_matmul`, where it serves."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def product(
    num_rows: int, shape: tuple[int, ...], num_in_dims: int, dtype: Any, *, gated: bool = False
) -> Product | None:
    """What multiplies x [num_rows, *in_shape] with [*in_shape, *out_shape], both whole on one device.

    Args:
      num_rows: of x.
      shape: of the weights, or of the part of them that each device has.
      num_in_dims: of its dimensions that are summed over.
      dtype: of both.
      gated: out_shape is (2, wide), the gate first, and the result [num_rows, wide] is SwiGLU's.

    Returns:
      A function of x, the weights, a bias [*out_shape] or None, and `relu`, after which nothing is negative;
      a gated one has neither. None if the kernel does not serve it, or was not asked for.
    """
    backend = _backend.get()
    depth, out_shape = math.prod(shape[:num_in_dims]), shape[num_in_dims:]
    width = math.prod(out_shape) // (1 + gated)
    if backend == XLA or not decode_matmul.serves(num_rows, depth, width, gated=gated, dtype=dtype):
        return None

    def run(
        x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, *, relu: bool = False
    ) -> jax.Array:
        x, kernel = x.reshape(num_rows, depth), kernel.reshape(depth, -1)
        bias = None if bias is None else bias.reshape(-1)
        y = decode_matmul.decode_matmul(x, kernel, bias, gated=gated, relu=relu, backend=backend)
        return y if gated else y.reshape(num_rows, *out_shape)

    return run
