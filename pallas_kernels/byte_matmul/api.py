"""Public call of products with weights in 8 bits: argument checks, choice of a back end, dispatch.

Owns: the limits of the kernel, and the error for unsupported arguments. Does not know: how it works, or how
weights become codes.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from pallas_kernels.byte_matmul.tiles import (
    BLOCK_K,
    MAX_ROWS,
    MIN_PROGRAMS,
    ByteTile,
    default_tile,
    has_supported_rows,
)
from pallas_kernels.byte_matmul.xla import xla_byte_matmul
from pallas_kernels.decode_matmul import GATES, device_limit

BACKENDS = ("auto", "xla", "pallas_mosaic_gpu")
CODE_DTYPES = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))


class ByteMatmulArgumentError(ValueError):
    """An argument is not supported by the product; the message says what is."""


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
    """Return whether the kernel supports x of `dtype` and these sizes, on a device on which it runs."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return False
    return default_tile(num_rows, depth, width, gated=gated) is not None


def byte_matmul(
    x: Annotated[jax.Array, "f[num_rows, depth]"],
    codes: Annotated[jax.Array, "[columns, depth]"],
    scale: Annotated[jax.Array, "f32[columns]"],
    bias: Annotated[jax.Array, "f[width]"] | None = None,
    *,
    gated: bool = False,
    activation: str = "silu",
    relu: bool = False,
    backend: str = "auto",
    tile: ByteTile | None = None,
    interpret: bool = False,
) -> Annotated[jax.Array, "f[num_rows, width]"]:
    """Return `(x @ codes.T) * scale + bias`, or of two such products f(gate) * up; in float32, rounded once.

    With the kernel, the result of a row depends on that row alone.

    Args:
      x: [num_rows, depth]. The kernel needs up to 8 rows, or a multiple of 8 up to `MAX_ROWS`, in bfloat16.
      codes: [width, depth] in int8 or float8_e4m3fn; if gated, [2 * width, depth], the gate's rows first.
      scale: the factor of each row of `codes`.
      bias: [width] of x's dtype, added before rounding; not for a gated product.
      gated: return `f(y[:, :width]) * y[:, width:]` of the product y.
      activation: name of f, one of `decode_matmul.GATES`.
      relu: clip negative results to 0, after the bias; not for a gated product.
      backend: "auto" selects the kernel if it supports these arrays on the first device.
      tile: tile of the kernel; None means its choice.
      interpret: run the kernel without a GPU, slowly; `backend` must name it.

    Returns:
      [num_rows, width] in the dtype of x.

    Raises:
      ByteMatmulArgumentError: arrays do not match, or `backend` names the kernel and it does not support
        them. If it is named and does not run on the device, JAX raises instead, since programs may be lowered
        for a GPU on a machine without one.
    """
    if backend not in BACKENDS:
        raise ByteMatmulArgumentError(f"backend is {backend!r}, but must be one of {BACKENDS}")
    if interpret and backend != "pallas_mosaic_gpu":
        raise ByteMatmulArgumentError(f"backend is {backend!r}, but interpret needs 'pallas_mosaic_gpu'")
    if activation not in GATES:
        raise ByteMatmulArgumentError(f"activation is {activation!r}, but must be one of {GATES}")
    sizes = _sizes(x, codes, scale, gated=gated)
    _check_bias(x, bias, sizes[2], gated=gated, relu=relu)
    if backend == "auto":
        backend = choose_backend(*sizes, gated=gated, dtype=x.dtype, device=jax.devices()[0])
    gate = activation if gated else None
    if backend == "xla":
        return xla_byte_matmul(x, codes, scale, bias, gate=gate, relu=relu)
    tile = _checked_tile(x, codes, sizes, tile, gated=gated)
    # Imported late: it needs a part of JAX that only builds for NVIDIA GPUs contain.
    from pallas_kernels.byte_matmul.pallas_mosaic_gpu import mosaic_byte_matmul

    return mosaic_byte_matmul(x, codes, scale, bias, gate=gate, relu=relu, tile=tile, interpret=interpret)


def _checked_tile(
    x: jax.Array, codes: jax.Array, sizes: tuple[int, int, int], tile: ByteTile | None, *, gated: bool
) -> ByteTile:
    """Return the given or chosen tile; `sizes` is the result of `_sizes`.

    Raises ByteMatmulArgumentError if the kernel does not support the arrays.
    """
    num_rows, depth, width = sizes
    otherwise = "; use backend 'xla'"
    if not has_supported_rows(num_rows) or x.dtype != jnp.bfloat16:
        limit = f"1 to 8 rows, or a multiple of 8 up to {MAX_ROWS}, of bfloat16"
        raise ByteMatmulArgumentError(f"x is {_named(x)}, but pallas_mosaic_gpu supports {limit}{otherwise}")
    if tile is None:
        tile = default_tile(num_rows, depth, width, gated=gated)
        if tile is None:
            limit = (
                f"pallas_mosaic_gpu needs a depth in two or more blocks of {BLOCK_K}, and a width in "
                f"{MIN_PROGRAMS} parts or more of 64 or 128 columns"
            )
            what = f"codes is {_named(codes)}"
            raise ByteMatmulArgumentError(f"{what}, but {limit}{otherwise}, or name a tile")
    if not tile.fits(num_rows, gated=gated):
        limit = (
            "must have 64 or 128 columns, and two stages or more, which fit in shared memory; with 64 "
            "columns that are not gated, an even number of them"
        )
        raise ByteMatmulArgumentError(f"tile is {tile}, but {limit}")
    if not tile.divides(depth, width):
        limit = f"must have columns that divide {width}, and {depth} must be two or more times {BLOCK_K}"
        raise ByteMatmulArgumentError(f"tile is {tile}, but {limit}{otherwise}")
    return tile


def _sizes(x: jax.Array, codes: jax.Array, scale: jax.Array, *, gated: bool) -> tuple[int, int, int]:
    """Return rows, depth and width of the product; raise ByteMatmulArgumentError if arrays do not match."""
    if codes.dtype not in CODE_DTYPES:
        names = " or ".join(dtype.name for dtype in CODE_DTYPES)
        raise ByteMatmulArgumentError(f"codes is {_named(codes)}, but must be of {names}")
    if x.ndim != 2 or codes.ndim != 2 or x.shape[1] != codes.shape[1] or not x.size or not codes.size:
        limit = "must be [num_rows, depth] and [columns, depth], none of them 0"
        raise ByteMatmulArgumentError(f"x and codes are {_named(x)} and {_named(codes)}, but {limit}")
    if gated and codes.shape[0] % 2:
        limit = "must have as many rows for up as for the gate"
        raise ByteMatmulArgumentError(f"codes is {_named(codes)}, but {limit}")
    if scale.shape != codes.shape[:1] or scale.dtype != jnp.float32:
        raise ByteMatmulArgumentError(f"scale is {_named(scale)}, but must be float32[{codes.shape[0]}]")
    return x.shape[0], x.shape[1], codes.shape[0] // (1 + gated)


def _check_bias(x: jax.Array, bias: jax.Array | None, width: int, *, gated: bool, relu: bool) -> None:
    if gated and (bias is not None or relu):
        raise ByteMatmulArgumentError("gated is True, but a gated product has neither a bias nor relu")
    if bias is not None and (bias.shape != (width,) or bias.dtype != x.dtype):
        raise ByteMatmulArgumentError(f"bias is {_named(bias)}, but must be {x.dtype.name}[{width}]")


def _named(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
