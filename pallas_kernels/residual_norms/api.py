"""Public call of the residual norm: argument checks, choice of a back end, dispatch, derivative.

Owns: the limits of each back end, and the error for unsupported arguments.
Does not know: how any back end works.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from pallas_kernels.devices import triton_device_limit
from pallas_kernels.residual_norms.specs import KINDS, MAX_WIDTH, NormKind, NormSpec, RowBlock, row_block
from pallas_kernels.residual_norms.xla import xla_add_and_norm

BACKENDS = ("auto", "xla", "pallas_triton")
_DTYPES = ("bfloat16", "float16", "float32")


class NormArgumentError(ValueError):
    """An argument is not supported by any back end, or not by the selected one; the message says what is."""


def choose_backend(width: int, device: jax.Device | AbstractDevice | None) -> str:
    """Return the fastest back end for rows of `width` elements on `device`.

    Programs may be lowered for an abstract device. If that is an NVIDIA GPU, the kernel is assumed to run on
    it. None is an unknown device.
    """
    if device is None or isinstance(device, AbstractDevice):
        supported = device is not None and device.platform == "cuda"
    else:
        supported = triton_device_limit(device) is None
    return "pallas_triton" if supported and width <= MAX_WIDTH else "xla"


def add_and_norm(
    x: Annotated[jax.Array, "f32[num_rows, width]"],
    y: Annotated[jax.Array, "f[num_rows, width]"] | None,
    scale: Annotated[jax.Array, "f[width]"] | None = None,
    bias: Annotated[jax.Array, "f[width]"] | None = None,
    *,
    kind: NormKind,
    eps: float,
    dtype: Any,
    backend: str = "auto",
    block: RowBlock | None = None,
    interpret: bool = False,
) -> tuple[Annotated[jax.Array, "f32[num_rows, width]"], Annotated[jax.Array, "f[num_rows, width]"]]:
    """Return `x + y` and its norm over the last dimension, times scale, plus bias; all in float32.

    The result of a row depends on that row alone. All back ends use the derivative of the XLA form.

    Args:
      x: f32[num_rows, width], the residual stream.
      y: [num_rows, width] of a supported dtype, the term that is added; None means nothing.
      scale: [width]; None means one.
      bias: [width]; None means zero.
      kind: "rms" or "layer".
      eps: added to the mean square, or the variance.
      dtype: dtype of the normed rows, which are rounded once.
      backend: "auto" selects the fastest that supports this width on the first device.
      block: block of `pallas_triton`; None chooses it by width.
      interpret: run the Triton kernel without a GPU, slowly.

    Returns:
      The sum, f32[num_rows, width] (x itself without y), and the normed rows in `dtype`.

    Raises:
      NormArgumentError: arrays do not match, or the back end does not support them.
    """
    spec = NormSpec(kind, eps, jnp.dtype(dtype))
    _check(x, y, scale, bias, spec, backend)
    width = x.shape[1]
    if backend == "auto":
        backend = choose_backend(width, jax.devices()[0])
    if backend == "xla":
        return xla_add_and_norm(x, y, scale, bias, spec)
    return _fused(x, y, scale, bias, spec, block or row_block(width), interpret)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6))
def _fused(
    x: jax.Array,
    y: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: NormSpec,
    block: RowBlock,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    # Imported late: upstream has deprecated this back end, and only its own file may depend on it.
    from pallas_kernels.residual_norms.pallas_triton import triton_add_and_norm

    return triton_add_and_norm(x, y, scale, bias, spec=spec, block=block, interpret=interpret)


@_fused.defjvp
def _fused_jvp(
    spec: NormSpec, block: RowBlock, interpret: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Differentiate the XLA form, since the kernel has no derivative; training uses this."""
    out = _fused(*primals, spec, block, interpret)
    return out, jax.jvp(functools.partial(xla_add_and_norm, spec=spec), primals, tangents)[1]


def _check(
    x: jax.Array,
    y: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: NormSpec,
    backend: str,
) -> None:
    if x.ndim != 2 or not x.size or x.dtype != jnp.float32:
        raise NormArgumentError(f"x is {_named(x)}, but must be float32[num_rows, width], neither of them 0")
    shapes = {"y": (y, x.shape), "scale": (scale, x.shape[1:]), "bias": (bias, x.shape[1:])}
    for name, (array, shape) in shapes.items():
        if array is not None and (array.shape != shape or array.dtype.name not in _DTYPES):
            limit = f"must be {list(shape)} as x is, of {' or '.join(_DTYPES)}"
            raise NormArgumentError(f"{name} is {_named(array)}, but {limit}")
    if spec.kind not in KINDS:
        raise NormArgumentError(f"kind is {spec.kind!r}, but must be one of {KINDS}")
    if spec.dtype.name not in _DTYPES:
        raise NormArgumentError(f"dtype is {spec.dtype.name}, but must be one of {_DTYPES}")
    if backend not in BACKENDS:
        raise NormArgumentError(f"backend is {backend!r}, but must be one of {BACKENDS}")
    if backend == "pallas_triton" and x.shape[1] > MAX_WIDTH:
        raise NormArgumentError(
            f"pallas_triton supports rows of at most {MAX_WIDTH} elements; use backend 'xla' for {x.shape[1]}"
        )


def _named(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
