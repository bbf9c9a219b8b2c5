"""Who multiplies the few rows of a decode step with a layer's weights.

Owns: the choice, which whoever traces a step makes for what is traced inside `multiplying_by`; without one it
is XLA's, which is asked in `layers`. Does not know: kernels, or models. Called by: layers, and the runner's
step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from model_defs.sharding import AnyMesh
from pallas_kernels import decode_matmul
from pallas_kernels.devices import on_every_device

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
    x: jax.Array, kernel: jax.Array, mesh: AnyMesh, num_in_dims: int, *, gated: bool = False
) -> jax.Array | None:
    """[T, *in_shape] times [*in_shape, *out_shape]; None: the kernel does not serve it, or was not asked for.

    Gated, out_shape is (2, wide), the gate first, and the result [T, wide] is SwiGLU's.
    """
    if _backend.get() == XLA or mesh.size > 1:
        return None
    depth, out_shape = math.prod(kernel.shape[:num_in_dims]), kernel.shape[num_in_dims:]
    num_rows, width = x.shape[0], math.prod(out_shape) // (1 + gated)
    if not decode_matmul.serves(num_rows, depth, width, gated=gated, dtype=kernel.dtype):
        return None

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return decode_matmul.decode_matmul(x, kernel, gated=gated, backend=_backend.get())

    y = on_every_device(run, mesh)(x.reshape(num_rows, depth), kernel.reshape(depth, -1))
    return y if gated else y.reshape(num_rows, *out_shape)
