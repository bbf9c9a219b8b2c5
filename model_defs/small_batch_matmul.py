"""Choice of the matmul for the few rows of a decode step.

Owns: the choice. Code traced inside `multiplying_by` uses the given back end; outside of it, `layers` uses
XLA. Does not know: kernels, models, or how arrays are placed on devices.

The choice is a context variable because it belongs to a step and not to the model, which is also called
without a step. As an argument, it would pass through every method between `run_layers` and `Linear`, in each
family. `jax.jit` does not see it, so it must also be among the static arguments of the traced function.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from pallas_kernels import byte_matmul, decode_matmul

Product = Callable[..., jax.Array]
XLA = "xla"
_backend: ContextVar[str] = ContextVar("small_batch_matmul", default=XLA)


@contextlib.contextmanager
def multiplying_by(backend: str) -> Iterator[None]:
    """Make code that is traced in this context use a back end of `decode_matmul`, for supported shapes."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def product(
    num_rows: int,
    shape: tuple[int, ...],
    num_in_dims: int,
    dtype: Any,
    *,
    gate: str | None = None,
    in_8_bits: bool = False,
) -> Product | None:
    """Return the product of x [num_rows, *in_shape] with [*in_shape, *out_shape] on one device.

    Args:
      num_rows: rows of x.
      shape: shape of the weights, or of each device's part of them.
      num_in_dims: number of dimensions of `shape` that are summed over.
      dtype: dtype of x, and of weights that are not in 8 bits.
      gate: out_shape is (2, wide), the gate first, and the result [num_rows, wide] is up times this function
        of the gate; None for a plain product.
      in_8_bits: the weights are codes [*out_shape, *in_shape] and scales f32[*out_shape].

    Returns:
      A function of x, the weights, a bias [*out_shape] or None, and `relu`, which clips at 0. A gated product
      has neither bias nor relu. Weights in 8 bits are a pair of codes and scales. None if the kernel does not
      support the shape or the gate, or XLA is chosen.
    """
    backend, gated = _backend.get(), gate is not None
    depth, out_shape = math.prod(shape[:num_in_dims]), shape[num_in_dims:]
    width = math.prod(out_shape) // (1 + gated)
    kernels: Any = byte_matmul if in_8_bits else decode_matmul
    if backend == XLA or gate not in (None, *kernels.GATES):
        return None
    if not kernels.supports(num_rows, depth, width, gated=gated, dtype=dtype):
        return None

    def run(x: jax.Array, weights: Any, bias: jax.Array | None = None, *, relu: bool = False) -> jax.Array:
        x = x.reshape(num_rows, depth)
        bias = None if bias is None else bias.reshape(-1)
        options: dict[str, Any] = {
            "gated": gated,
            "activation": gate or "silu",
            "relu": relu,
            "backend": backend,
        }
        if in_8_bits:
            codes, scale = weights[0].reshape(-1, depth), weights[1].reshape(-1)
            y = byte_matmul.byte_matmul(x, codes, scale, bias, **options)
        else:
            y = decode_matmul.decode_matmul(x, weights.reshape(depth, -1), bias, **options)
        return y if gated else y.reshape(num_rows, *out_shape)

    return run
