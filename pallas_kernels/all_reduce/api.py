"""The public calls: argument checks, and what is served.

Owns: what a sum over devices is: in the order of devices, in float32, rounded once to what was summed.
Does not know: how devices reach each other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.all_reduce.affine import Affine
from pallas_kernels.all_reduce.peers import peers_limit
from pallas_kernels.all_reduce.specs import FASTER_WHOLE, MAX_DEVICES, MAX_ROW_BYTES, MAX_ROWS
from pallas_kernels.devices import triton_device_limit
from pallas_kernels.residual_norms import KINDS, NormSpec, add_and_norm

_BACKENDS = ("jax_triton", "xla")
_DTYPES = ("bfloat16", "float16", "float32")
_WORD_BYTES = 16
_LINE = 8  # numbers that a row must be a multiple of, so that it is written in whole words


class SumArgumentError(ValueError):
    """An argument that is not served; the message says what would do."""


def devices_limit(devices: Sequence[jax.Device]) -> str | None:
    """Why sums over these devices are left to XLA; None: they need not be."""
    if (limit := triton_device_limit(devices[0])) is not None:
        return limit
    missing = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"it needs the extra 'triton' ({' and '.join(missing)} cannot be imported)"
    return peers_limit([device.local_hardware_id for device in devices])


def supports(num_rows: int, width: int, dtype: Any, num_devices: int) -> bool:
    """Whether so many rows of partial sums in `dtype` are summed here, on every device."""
    return 0 < num_rows <= MAX_ROWS and _is_supported(width, dtype, num_devices)


def supports_shares(num_rows: int, width: int, dtype: Any, num_devices: int) -> bool:
    """Whether so many rows of partial sums in `dtype` are summed here, each device its share."""
    return num_rows > 0 and num_rows % num_devices == 0 and _is_supported(width, dtype, num_devices)


def shares_are_faster(num_rows: int, width: int, dtype: Any, num_devices: int) -> bool:
    """Whether so many rows with a norm behind them are summed in shares though they could be summed whole."""
    return supports_shares(num_rows, width, dtype, num_devices) and num_rows > FASTER_WHOLE[num_devices]


def _is_supported(width: int, dtype: Any, num_devices: int) -> bool:
    found = jnp.dtype(dtype)
    fits = width % _LINE == 0 and 0 < width * found.itemsize <= MAX_ROW_BYTES
    return fits and found.name in _DTYPES and 1 < num_devices <= MAX_DEVICES


def sum_over_devices(
    partial: jax.Array, table: jax.Array, *, axis: str, capacity: int, backend: str = "jax_triton"
) -> jax.Array:
    """[num_rows, width] of each device -> their sum, the same bits on all of them.

    Args:
      partial: this device's partial sums.
      table: i32[1, 2 * table_len], this device's row of `ExchangeMemory.table`.
      axis: the mesh's.
      capacity: bytes, as of the memory.
      backend: "jax_triton", or "xla" for any device, which sums in an order of its own and reads no table.

    Raises:
      SumArgumentError: `serves` says no, or dtypes or shapes that do not belong together.
    """
    num_devices = _check(partial, axis, capacity, backend)
    if backend == "xla":
        return lax.psum(partial, axis)
    from pallas_kernels.all_reduce.jax_triton import triton_sum  # the extra `triton`

    return triton_sum(partial, table, num_devices=num_devices, capacity=capacity)


def sum_and_norm(
    partial: jax.Array,
    table: jax.Array,
    stream: jax.Array,
    affine: Affine,
    *,
    norm: NormSpec,
    axis: str,
    capacity: int,
    backend: str = "jax_triton",
) -> tuple[jax.Array, jax.Array]:
    """The stream f32[num_rows, width] and the sum with its bias, added, and the norm of that.

    Args:
      partial: as of `sum_over_devices`, like what is not named here.
      table: likewise.
      stream: f32[num_rows, width].
      affine: arrays of [width]; the sum's bias in the dtype of the partial sums.
      norm: which one; the normed rows are in its dtype, rounded to it once.
      axis: likewise.
      capacity: likewise.
      backend: likewise.

    Raises:
      SumArgumentError: `serves` says no, or dtypes or shapes that do not belong together.
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
    partial: jax.Array,
    table: jax.Array,
    share: jax.Array,
    affine: Affine,
    *,
    norm: NormSpec,
    axis: str,
    capacity: int,
    backend: str = "jax_triton",
) -> tuple[jax.Array, jax.Array]:
    """Each device adds up its share of many rows, the first device the first ones.

    Args:
      partial: [num_rows, width], this device's partial sums.
      table: as of `sum_over_devices`.
      share: f32[num_rows / devices, width], the stream's rows of this device.
      affine: as of `sum_and_norm`.
      norm: likewise.
      axis: the mesh's.
      capacity: bytes, as of the memory; shares that it holds twice take the shorter way, through inboxes, if
        normed numbers have as many bytes. With 0 none do, whatever the memory has.
      backend: as of `sum_over_devices`.

    Returns:
      This device's share of the stream with the sum, as `share` is, and the norm of everybody's,
      [num_rows, width] in the norm's dtype.

    Raises:
      SumArgumentError: `supports_shares` says no, or dtypes or shapes that do not belong together.
    """
    num_devices = lax.axis_size(axis)
    _check_static(capacity, backend)
    if partial.ndim != 2 or not supports_shares(*partial.shape, partial.dtype, num_devices):
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
    is_supported = partial.ndim == 2 and supports(*partial.shape, partial.dtype, num_devices)
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
    """What comes with sums of `num_rows` rows on this device."""
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
