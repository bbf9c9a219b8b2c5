"""Public call of the small-batch product: argument checks, choice of a back end, dispatch.

Owns: the limits of the kernel, and the error for unsupported arguments. Does not know: how it works.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from pallas_kernels.decode_matmul.tiles import (
    MIN_PROGRAMS,
    ROWS,
    MatmulTile,
    default_tile,
    has_supported_rows,
)
from pallas_kernels.decode_matmul.xla import xla_decode_matmul
from pallas_kernels.devices import mosaic_device_limit

BACKENDS = ("auto", "xla", "pallas_mosaic_gpu")
GATES = ("silu", "gelu_tanh")
"""Functions of a gated product's gate; "gelu_tanh" is GELU in its tanh form."""
MAX_ROWS = ROWS[-1]
"""Most rows. With more, arithmetic and not memory is the limit; XLA's products are for those."""


class MatmulArgumentError(ValueError):
    """An argument is not supported by the kernel; the message says what is."""


def device_limit(device: jax.Device | AbstractDevice | None) -> str | None:
    """Return why the kernel does not run on `device`; None if it does.

    Programs may be lowered for an abstract device. If that is an NVIDIA GPU, the kernel is assumed to run.
    """
    if device is None:
        return "the device is unknown"
    if isinstance(device, AbstractDevice):
        return None if device.platform == "cuda" else f"{device.device_kind!r} is not an NVIDIA GPU"
    return mosaic_device_limit(device)


def choose_backend(
    num_rows: int,
    depth: int,
    width: int,
    *,
    gated: bool,
    dtype: Any,
    device: jax.Device | AbstractDevice | None,
) -> str:
    """Return the faster back end for x [num_rows, depth] and a result [num_rows, width] on `device`."""
    is_supported = supports(num_rows, depth, width, gated=gated, dtype=dtype)
    return "pallas_mosaic_gpu" if is_supported and device_limit(device) is None else "xla"


def supports(num_rows: int, depth: int, width: int, *, gated: bool, dtype: Any) -> bool:
    """Return whether the kernel supports these arrays, on a device on which it runs."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return False
    return default_tile(num_rows, depth, width, gated=gated) is not None


def decode_matmul(
    x: Annotated[jax.Array, "f[num_rows, depth]"],
    w: Annotated[jax.Array, "f[depth, columns]"],
    bias: Annotated[jax.Array, "f[width]"] | None = None,
    *,
    gated: bool = False,
    activation: str = "silu",
    relu: bool = False,
    backend: str = "auto",
    tile: MatmulTile | None = None,
    interpret: bool = False,
) -> Annotated[jax.Array, "f[num_rows, width]"]:
    """Return `x @ w + bias`, or `f(x @ gate) * (x @ up)`, for few rows; in float32, rounded once.

    With the kernel, the result of a row depends on that row alone.

    Args:
      x: [num_rows, depth]. The kernel needs up to 8 rows, or a multiple of 8 up to `MAX_ROWS`, in bfloat16.
      w: [depth, width] of the same dtype; if gated, [depth, 2 * width], the gate's columns first.
      bias: [width] of the same dtype, added before rounding; not for a gated product.
      gated: compute the second form.
      activation: name of f, one of `GATES`.
      relu: clip negative results to 0, after the bias; not for a gated product.
      backend: "auto" selects the kernel if it supports these arrays on the first device.
      tile: tile of the kernel; None means the measured choice.
      interpret: run the kernel without a GPU, slowly; `backend` must name it.

    Returns:
      [num_rows, width] in the dtype of x.

    Raises:
      MatmulArgumentError: arrays do not match, `activation` is unknown, or `backend` names the kernel and it
        does not support them. If it is named and does not run on the device (see `device_limit`), JAX raises
        instead, since programs may be lowered for a GPU on a machine without one.
    """
    if backend not in BACKENDS:
        raise MatmulArgumentError(f"backend is {backend!r}, but must be one of {BACKENDS}")
    if interpret and backend != "pallas_mosaic_gpu":
        raise MatmulArgumentError(f"backend is {backend!r}, but interpret needs 'pallas_mosaic_gpu'")
    if activation not in GATES:
        raise MatmulArgumentError(f"activation is {activation!r}, but must be one of {GATES}")
    sizes = _sizes(x, w, gated=gated)
    _check_bias(x, bias, sizes[2], gated=gated, relu=relu)
    if backend == "auto":
        backend = choose_backend(*sizes, gated=gated, dtype=x.dtype, device=jax.devices()[0])
    gate = activation if gated else None
    if backend == "xla":
        return xla_decode_matmul(x, w, bias, gate=gate, relu=relu)
    tile = _checked_tile(x, w, sizes, tile, gated=gated)
    # Imported late: it needs a part of JAX that only builds for NVIDIA GPUs contain.
    from pallas_kernels.decode_matmul.pallas_mosaic_gpu import mosaic_decode_matmul

    return mosaic_decode_matmul(x, w, bias, gate=gate, relu=relu, tile=tile, interpret=interpret)


def _checked_tile(
    x: jax.Array, w: jax.Array, sizes: tuple[int, int, int], tile: MatmulTile | None, *, gated: bool
) -> MatmulTile:
    """Return the given or chosen tile; raise MatmulArgumentError if the kernel does not support the arrays.

    `sizes` is the result of `_sizes`.
    """
    num_rows, depth, width = sizes
    otherwise = "; use backend 'xla'"
    if not has_supported_rows(num_rows) or x.dtype != jnp.bfloat16:
        limit = f"1 to 8 rows, or a multiple of 8 up to {MAX_ROWS}, of bfloat16"
        raise MatmulArgumentError(f"x is {_named(x)}, but pallas_mosaic_gpu supports {limit}{otherwise}")
    if tile is None:
        tile = default_tile(num_rows, depth, width, gated=gated)
        if tile is None:
            limit = (
                "pallas_mosaic_gpu needs a depth in blocks of 64, and a width in parts of 64 or 128 columns, "
                f"{MIN_PROGRAMS} parts or more, without a half-empty last round of programs"
            )
            raise MatmulArgumentError(f"w is {_named(w)}, but {limit}{otherwise}, or name a tile")
    if not tile.fits(num_rows, gated=gated):
        limit = (
            "must have a multiple of 64 columns, a block_k that is a multiple of 64, and two stages or more, "
            "which fit in shared memory"
        )
        raise MatmulArgumentError(f"tile is {tile}, but {limit}")
    if not tile.divides(depth, width):
        limit = f"must have columns that divide {width} and a block_k that divides {depth}"
        raise MatmulArgumentError(f"tile is {tile}, but {limit}{otherwise}")
    return tile


def _sizes(x: jax.Array, w: jax.Array, *, gated: bool) -> tuple[int, int, int]:
    """Return rows, depth and width of the product; raise MatmulArgumentError if arrays do not match."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or x.dtype != w.dtype or not x.size:
        limit = "must be [num_rows, depth] and [depth, width] of one dtype, none of them 0"
        raise MatmulArgumentError(f"x and w are {_named(x)} and {_named(w)}, but {limit}")
    if gated and w.shape[1] % 2:
        raise MatmulArgumentError(f"w is {_named(w)}, but must have as many columns for up as for the gate")
    return x.shape[0], x.shape[1], w.shape[1] // (1 + gated)


def _check_bias(x: jax.Array, bias: jax.Array | None, width: int, *, gated: bool, relu: bool) -> None:
    if gated and (bias is not None or relu):
        raise MatmulArgumentError("gated is True, but a gated product has neither a bias nor relu")
    if bias is not None and (bias.shape != (width,) or bias.dtype != x.dtype):
        raise MatmulArgumentError(f"bias is {_named(bias)}, but must be {x.dtype.name}[{width}]")


def _named(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
