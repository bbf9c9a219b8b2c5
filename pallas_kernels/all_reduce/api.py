"""The public calls: argument checks, and what is served.

Owns: what a sum over devices is: in the order of devices, in float32, rounded once to what was summed.
Does not know: how devices reach each other.
Called by: model code inside `shard_map`, each device with its partial sums and its row of the table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.all_reduce.peers import peers_limit
from pallas_kernels.all_reduce.specs import MAX_DEVICES, MAX_ROWS, MAX_WIDTH
from pallas_kernels.devices import triton_device_limit
from pallas_kernels.residual_norms import add_and_norm

_BACKENDS = ("jax_triton", "xla")
_DTYPES = ("bfloat16", "float16", "float32")
_LINE = 8  # numbers that a row must be a multiple of, so that it is written in whole words of 16 bytes


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


def serves(num_rows: int, width: int, num_devices: int) -> bool:
    """Whether so many rows are summed here, on every device."""
    return num_rows <= MAX_ROWS and _is_served(width, num_devices)


def serves_shares(num_rows: int, width: int, num_devices: int) -> bool:
    """Whether so many rows are summed here, each device its share."""
    return num_rows % num_devices == 0 and _is_served(width, num_devices)


def _is_served(width: int, num_devices: int) -> bool:
    return 1 < num_devices <= MAX_DEVICES and width <= MAX_WIDTH and width % _LINE == 0


def sum_over_devices(
    partial: jax.Array, table: jax.Array, *, axis: str, capacity: int, backend: str = "jax_triton"
) -> jax.Array:
    """[num_rows, width] of each device -> their sum, the same bits on all of them.

    Args:
      partial: this device's partial sums.
      table: i32[1, 2 * table_len], this device's row of `ExchangeMemory.table`.
      axis: the mesh's.
      capacity: as of the memory.
      backend: "jax_triton", or "xla" for any device, which sums in an order of its own and reads no table.

    Raises:
      SumArgumentError: `serves` says no, or dtypes or shapes that do not belong together.
    """
    num_devices = _check(partial, axis, capacity, backend)
    if backend == "xla":
        return lax.psum(partial, axis)
    from pallas_kernels.all_reduce.jax_triton import triton_sum  # the extra `triton`

    return triton_sum(partial, table, None, None, num_devices=num_devices, capacity=capacity)[0]


def sum_and_norm(
    partial: jax.Array,
    table: jax.Array,
    stream: jax.Array,
    scale: jax.Array,
    *,
    axis: str,
    capacity: int,
    eps: float,
    dtype: Any,
    backend: str = "jax_triton",
) -> tuple[jax.Array, jax.Array]:
    """The stream f32[num_rows, width] and the sum, added, and the root-mean-square norm of that in `dtype`.

    Other arguments and errors are those of `sum_over_devices`; `scale` [width] is the norm's.
    """
    num_devices = _check(partial, axis, capacity, backend)
    if stream.shape != partial.shape or stream.dtype != jnp.float32 or scale.shape != partial.shape[1:]:
        raise SumArgumentError(
            f"stream and scale are {stream.dtype.name}{list(stream.shape)} and {list(scale.shape)}, but must "
            f"be float32{list(partial.shape)} and {list(partial.shape[1:])} as the partial sums are"
        )
    if backend == "xla":
        total = lax.psum(partial, axis)
        return add_and_norm(stream, total, scale, kind="rms", eps=eps, dtype=dtype, backend="xla")
    from pallas_kernels.all_reduce.jax_triton import triton_sum  # the extra `triton`

    return triton_sum(
        partial, table, stream, scale, num_devices=num_devices, capacity=capacity, eps=eps, dtype=dtype
    )


def sum_and_norm_of_shares(
    partial: jax.Array,
    table: jax.Array,
    share: jax.Array,
    scale: jax.Array,
    *,
    axis: str,
    eps: float,
    dtype: Any,
    backend: str = "jax_triton",
) -> tuple[jax.Array, jax.Array]:
    """Each device adds up its share of many rows, the first device the first ones.

    Args:
      partial: [num_rows, width], this device's partial sums.
      table: as of `sum_over_devices`.
      share: f32[num_rows / devices, width], the stream's rows of this device.
      scale: [width], of the norm.
      axis: the mesh's.
      eps: of the norm.
      dtype: of the normed rows.
      backend: as of `sum_over_devices`.

    Returns:
      This device's share of the stream with the sum, as `share` is, and the root-mean-square norm of
      everybody's, [num_rows, width] in `dtype`.

    Raises:
      SumArgumentError: `serves_shares` says no, or dtypes or shapes that do not belong together.
    """
    num_devices = lax.axis_size(axis)
    _check_backend(backend)
    is_known = partial.ndim == 2 and partial.dtype.name in _DTYPES
    if not is_known or not serves_shares(partial.shape[0], partial.shape[1], num_devices):
        raise SumArgumentError(
            f"partial sums are {partial.dtype.name}{list(partial.shape)} of {num_devices} devices, but must "
            f"be [num_rows, width] of {' or '.join(_DTYPES)}, of 2 to {MAX_DEVICES} devices, which divide "
            f"the rows, with at most {MAX_WIDTH} columns, a multiple of {_LINE}"
        )
    expected = partial.shape[0] // num_devices, partial.shape[1]
    if share.shape != expected or share.dtype != jnp.float32 or scale.shape != expected[1:]:
        raise SumArgumentError(
            f"share and scale are {share.dtype.name}{list(share.shape)} and {list(scale.shape)}, but must be "
            f"float32{list(expected)} and {list(expected[1:])} by the partial sums"
        )
    if backend == "xla":
        total = lax.psum_scatter(partial, axis, tiled=True)
        share, normed = add_and_norm(share, total, scale, kind="rms", eps=eps, dtype=dtype, backend="xla")
        return share, lax.all_gather(normed, axis, tiled=True)
    from pallas_kernels.all_reduce.jax_triton import triton_shares  # the extra `triton`

    return triton_shares(partial, table, share, scale, num_devices=num_devices, eps=eps, dtype=dtype)


def _check(partial: jax.Array, axis: str, capacity: int, backend: str) -> int:
    num_devices = lax.axis_size(axis)
    _check_backend(backend)
    is_known = partial.ndim == 2 and partial.dtype.name in _DTYPES
    if not is_known or not serves(partial.shape[0], partial.shape[1], num_devices) or partial.size > capacity:
        raise SumArgumentError(
            f"partial sums are {partial.dtype.name}{list(partial.shape)} of {num_devices} devices, but must "
            f"be [num_rows, width] of {' or '.join(_DTYPES)}, of 2 to {MAX_DEVICES} devices, with at most "
            f"{MAX_ROWS} rows, at most {MAX_WIDTH} columns, a multiple of {_LINE}, and {capacity} numbers"
        )
    return num_devices


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise SumArgumentError(f"backend is {backend!r}, but must be one of {_BACKENDS}")
