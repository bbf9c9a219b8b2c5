"""Public calls of the all-reduce: argument checks, supported shapes, dispatch.

Owns: the definition of a sum over devices: in device order, in float32, rounded once to the summands' dtype.
Does not know: how devices exchange data.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.all_reduce.affine import Affine
from pallas_kernels.all_reduce.peer_access import peer_access_limit
from pallas_kernels.all_reduce.specs import FASTER_WHOLE, MAX_DEVICES, MAX_ROW_BYTES, MAX_ROWS
from pallas_kernels.devices import triton_device_limit
from pallas_kernels.residual_norms import KINDS, NormSpec, add_and_norm

_BACKENDS = ("jax_triton", "xla")
_DTYPES = ("bfloat16", "float16", "float32")
_WORD_BYTES = 16
_LINE = 8  # a row is a multiple of this many numbers, so that it is written in whole words

Rows = Annotated[jax.Array, "f[num_rows, width]"]
"""Partial sums of this device, their sum, or its norm."""
Table = Annotated[jax.Array, "i32[1, 2 * table_len]"]
"""This device's row of `ExchangeMemory.table`."""


class SumArgumentError(ValueError):
    """An argument is not supported; the message says what is."""


def devices_limit(devices: Sequence[jax.Device]) -> str | None:
    """Return why sums over these devices are left to XLA; None if these kernels can run on them."""
    if (limit := triton_device_limit(devices[0])) is not None:
        return limit
    missing = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"it needs the extra 'triton' ({' and '.join(missing)} cannot be imported)"
    return peer_access_limit([device.local_hardware_id for device in devices])


def supports(num_rows: int, width: int, dtype: Any, num_devices: int) -> bool:
    """Return whether `sum_over_devices` and `sum_and_norm` support partial sums of this size."""
    return 0 < num_rows <= MAX_ROWS and _is_supported(width, dtype, num_devices)


def supports_shares(num_rows: int, width: int, dtype: Any, num_devices: int) -> bool:
    """Return whether `sum_and_norm_of_shares` supports partial sums of this size."""
    return num_rows > 0 and num_rows % num_devices == 0 and _is_supported(width, dtype, num_devices)


def shares_are_faster(num_rows: int, width: int, dtype: Any, num_devices: int) -> bool:
    """Return whether a sum with a norm is faster in shares than with every device summing all rows."""
    return supports_shares(num_rows, width, dtype, num_devices) and num_rows > FASTER_WHOLE[num_devices]


def _is_supported(width: int, dtype: Any, num_devices: int) -> bool:
    found = jnp.dtype(dtype)
    fits = width % _LINE == 0 and 0 < width * found.itemsize <= MAX_ROW_BYTES
    return fits and found.name in _DTYPES and 1 < num_devices <= MAX_DEVICES


def sum_over_devices(
    partial: Rows, table: Table, *, axis: str, capacity: int, backend: str = "jax_triton"
) -> Rows:
    """Return the sum over devices of their [num_rows, width], with the same bits on every device.

    Args:
      partial: this device's partial sums.
      table: i32[1, 2 * table_len], this device's row of `ExchangeMemory.table`.
      axis: name of the mesh axis.
      capacity: `ExchangeMemory.capacity`, in bytes.
      backend: "jax_triton"; or "xla", for any device: it has its own summation order and reads no table.

    Raises:
      SumArgumentError: `supports` returns False, or dtypes or shapes do not match.
    """
    num_devices = _check(partial, axis, capacity, backend)
    if backend == "xla":
        return lax.psum(partial, axis)
    from pallas_kernels.all_reduce.jax_triton import triton_sum  # the extra `triton`

    return triton_sum(partial, table, num_devices=num_devices, capacity=capacity)


def sum_and_norm(
    partial: Rows,
    table: Table,
    stream: Annotated[jax.Array, "f32[num_rows, width]"],
    affine: Affine,
    *,
    norm: NormSpec,
    axis: str,
    capacity: int,
    backend: str = "jax_triton",
) -> tuple[Annotated[jax.Array, "f32[num_rows, width]"], Rows]:
    """Add the sum over devices and its bias to the stream; return that, f32[num_rows, width], and its norm.

    Args:
      partial: as in `sum_over_devices`.
      table: as in `sum_over_devices`.
      stream: f32[num_rows, width].
      affine: arrays of [width]; the sum's bias has the dtype of the partial sums.
      norm: the norm; normed rows are rounded once, to its dtype.
      axis: as in `sum_over_devices`.
      capacity: as in `sum_over_devices`.
      backend: as in `sum_over_devices`.

    Raises:
      SumArgumentError: `supports` returns False, or dtypes or shapes do not match.
    """
    num_devices = _check(partial, axis, capacity, backend)
    _check_norm(stream, partial, affine, norm, num_rows=partial.shape[0])
    if backend == "xla":
        return _norm_by_xla(stream, lax.psum(partial, axis), affine, norm)
    from pallas_kernels.all_reduce.jax_triton import triton_sum_and_norm  # the extra `triton`

    return triton_sum_and_norm(
        partial, table, stream, affine, norm=norm, num_devices=num_devices, capacity=capacity
    )


def sum_and_norm_of_shares(
    partial: Rows,
    table: Table,
    share: Annotated[jax.Array, "f32[share_rows, width]"],
    affine: Affine,
    *,
    norm: NormSpec,
    axis: str,
    capacity: int,
    backend: str = "jax_triton",
) -> tuple[Annotated[jax.Array, "f32[share_rows, width]"], Rows]:
    """Sum and norm many rows: each device computes one share of them; the first device has the first rows.

    Args:
      partial: [num_rows, width], this device's partial sums.
      table: as in `sum_over_devices`.
      share: f32[num_rows / devices, width], this device's rows of the stream.
      affine: as in `sum_and_norm`.
      norm: as in `sum_and_norm`.
      axis: name of the mesh axis.
      capacity: `ExchangeMemory.capacity`, in bytes. If it holds two shares, and normed numbers are as large
        as partial sums, the faster kernel through peer buffers runs. 0 always selects the handshake kernel.
      backend: as in `sum_over_devices`.

    Returns:
      This device's share of the stream plus the sum, like `share`; and the norm of all devices' shares,
      [num_rows, width] in the norm's dtype.

    Raises:
      SumArgumentError: `supports_shares` returns False, or dtypes or shapes do not match.
    """
    num_devices = lax.axis_size(axis)
    _check_static(capacity, backend)
    shape = partial.shape
    if len(shape) != 2 or not supports_shares(shape[0], shape[1], partial.dtype, num_devices):
        raise SumArgumentError(
            f"partial sums are {_named(partial)} of {num_devices} devices, but must "
            f"be [num_rows, width] of {' or '.join(_DTYPES)}, of 2 to {MAX_DEVICES} devices, which divide "
            f"the rows, one or more each, of a multiple of {_LINE} columns, at most {MAX_ROW_BYTES} bytes"
        )
    _check_norm(share, partial, affine, norm, num_rows=partial.shape[0] // num_devices)
    if backend == "xla":
        total = lax.psum_scatter(partial, axis, tiled=True)
        share, normed = _norm_by_xla(share, total, affine, norm)
        return share, lax.all_gather(normed, axis, tiled=True)
    from pallas_kernels.all_reduce.jax_triton import triton_shares  # the extra `triton`

    return triton_shares(partial, table, share, affine, norm=norm, num_devices=num_devices, capacity=capacity)


def _norm_by_xla(
    stream: jax.Array, total: jax.Array, affine: Affine, norm: NormSpec
) -> tuple[jax.Array, jax.Array]:
    if affine.sum_bias is not None:
        total = total + affine.sum_bias
    return add_and_norm(stream, total, affine.scale, affine.bias, **norm._asdict(), backend="xla")


def _check(partial: jax.Array, axis: str, capacity: int, backend: str) -> int:
    num_devices = lax.axis_size(axis)
    _check_static(capacity, backend)
    shape = partial.shape
    is_supported = len(shape) == 2 and supports(shape[0], shape[1], partial.dtype, num_devices)
    if not is_supported or partial.size * partial.dtype.itemsize > capacity:
        raise SumArgumentError(
            f"partial sums are {_named(partial)} of {num_devices} devices, but must "
            f"be [num_rows, width] of {' or '.join(_DTYPES)}, of 2 to {MAX_DEVICES} devices, with 1 to "
            f"{MAX_ROWS} rows of a multiple of {_LINE} columns, at most {MAX_ROW_BYTES} bytes each, and "
            f"{capacity} together"
        )
    return num_devices


def _check_norm(
    stream: jax.Array, partial: jax.Array, affine: Affine, norm: NormSpec, *, num_rows: int
) -> None:
    """Raise SumArgumentError unless stream, affine and norm fit `num_rows` rows of sums on this device."""
    shape = num_rows, partial.shape[1]
    if stream.shape != shape or stream.dtype != jnp.float32:
        raise SumArgumentError(
            f"the stream is {_named(stream)}, but must be float32{list(shape)} by the partial sums"
        )
    for name, array in affine._asdict().items():
        dtypes = (partial.dtype.name,) if name == "sum_bias" else _DTYPES
        if array is not None and (array.shape != shape[1:] or array.dtype.name not in dtypes):
            limit = f"{list(shape[1:])} of {' or '.join(dtypes)}"
            raise SumArgumentError(f"{name} is {_named(array)}, but must be {limit} by the partial sums")
    dtype = jnp.dtype(norm.dtype).name
    if norm.kind not in KINDS or dtype not in _DTYPES:
        limit = f"must be one of {KINDS}, in one of {_DTYPES}"
        raise SumArgumentError(f"the norm is {norm.kind!r} in {dtype}, but {limit}")


def _named(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def _check_static(capacity: int, backend: str) -> None:
    if backend not in _BACKENDS:
        raise SumArgumentError(f"backend is {backend!r}, but must be one of {_BACKENDS}")
    if capacity % _WORD_BYTES:
        raise SumArgumentError(f"capacity is {capacity}, but must be a multiple of {_WORD_BYTES} bytes")
