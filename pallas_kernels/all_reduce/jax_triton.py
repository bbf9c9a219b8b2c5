"""Launches of the all-reduce kernels through jax-triton, for NVIDIA GPUs from Ampere on.

Owns: the choice of the kernel, and the arguments of its launch. Does not know: how the kernels work.
Called by: `api`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton

from pallas_kernels.all_reduce.affine import Affine
from pallas_kernels.all_reduce.handshake_kernels import shares_by_handshake
from pallas_kernels.all_reduce.peer_buffer_kernels import shares_by_peer_buffer, sum_of_rows
from pallas_kernels.all_reduce.specs import LIMIT, MAX_PROGRAMS, NUM_PROGRAMS, fits_in_peer_buffers
from pallas_kernels.residual_norms import NormSpec

# As in ragged_paged_attention.jax_triton: JAX assembles PTX with the CUDA version it runs on.
_OPTIONS = {"ptx_version": 88, "enable_fp_fusion": True}
_MAX_WARPS = {sum_of_rows: 16, shares_by_peer_buffer: 8, shares_by_handshake: 8}
_MIN_BLOCK = 32  # a number for each thread of a warp
_NUMBERS_OF_A_WARP = 512  # the least, so that each thread has whole words of 16 bytes


def triton_sum(partial: jax.Array, table: jax.Array, *, num_devices: int, capacity: int) -> jax.Array:
    """See `api.sum_over_devices`; arguments are already checked."""
    unused = jax.ShapeDtypeStruct((1,), partial.dtype)
    return _launch(
        sum_of_rows,
        (partial, table, None, Affine()),
        (jax.ShapeDtypeStruct(partial.shape, partial.dtype), unused),
        None,
        num_programs=NUM_PROGRAMS,
        name="sum_over_devices",
        num_rows=partial.shape[0],
        num_devices=num_devices,
        capacity=capacity,
        norms=False,
    )[0]


def triton_sum_and_norm(
    partial: jax.Array,
    table: jax.Array,
    stream: jax.Array,
    affine: Affine,
    *,
    norm: NormSpec,
    num_devices: int,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.sum_and_norm`; arguments are already checked."""
    return _launch(
        sum_of_rows,
        (partial, table, stream, affine),
        _stream_and_normed(stream, partial, norm),
        norm,
        num_programs=NUM_PROGRAMS,
        name=f"sum_and_norm_{norm.kind}",
        num_rows=partial.shape[0],
        num_devices=num_devices,
        capacity=capacity,
        norms=True,
    )


def triton_shares(
    partial: jax.Array,
    table: jax.Array,
    share: jax.Array,
    affine: Affine,
    *,
    norm: NormSpec,
    num_devices: int,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.sum_and_norm_of_shares`; arguments are already checked."""
    common: dict[str, Any] = {"num_rows": share.shape[0], "num_devices": num_devices}
    arrays, out_type = (partial, table, share, affine), _stream_and_normed(share, partial, norm)
    itemsize = partial.dtype.itemsize
    if fits_in_peer_buffers(share.size * itemsize, capacity) and jnp.dtype(norm.dtype).itemsize == itemsize:
        name = f"sum_and_norm_of_shares_by_peer_buffer_{norm.kind}"
        return _launch(
            shares_by_peer_buffer, arrays, out_type, norm,
            num_programs=NUM_PROGRAMS, name=name, capacity=capacity, **common,
        )  # fmt: skip
    name = f"sum_and_norm_of_shares_{norm.kind}"
    num_programs = min(MAX_PROGRAMS, share.shape[0])
    return _launch(
        shares_by_handshake, arrays, out_type, norm, num_programs=num_programs, name=name, **common
    )


def num_warps(kernel: Any, block: int) -> int:
    """Return the number of warps of a program of `kernel`, whose rows are padded to `block` columns."""
    return min(_MAX_WARPS[kernel], max(block // _NUMBERS_OF_A_WARP, 1))


type _Outputs = tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def _stream_and_normed(stream: jax.Array, partial: jax.Array, norm: NormSpec) -> _Outputs:
    return (
        jax.ShapeDtypeStruct(stream.shape, jnp.float32),
        jax.ShapeDtypeStruct(partial.shape, norm.dtype),
    )


def _launch(
    kernel: Any,
    arrays: tuple[jax.Array, jax.Array, jax.Array | None, Affine],
    out_type: _Outputs,
    norm: NormSpec | None,
    *,
    num_programs: int,
    name: str,
    capacity: int | None = None,
    **arguments: Any,
) -> tuple[jax.Array, jax.Array]:
    """Launch a kernel; `arguments` are those that only this kernel has. Missing arrays are not read.

    `capacity` is in bytes, and None for a kernel that has none; kernels count numbers.
    """
    partial, table, stream, affine = arrays
    if capacity is not None:
        arguments["capacity"] = capacity // partial.dtype.itemsize
    width = partial.shape[1]
    block = max(1 << (width - 1).bit_length(), _MIN_BLOCK)  # no two threads share a number
    result: tuple[jax.Array, jax.Array] = jax_triton.triton_call(
        partial,
        table,
        *(partial if array is None else array for array in (stream, *affine)),
        kernel=kernel,
        out_type=out_type,
        grid=(num_programs,),
        name=name,
        num_warps=num_warps(kernel, block),
        num_stages=1,
        backend_options=_OPTIONS,
        width=width,
        block=block,
        is_layer=norm is not None and norm.kind == "layer",
        **{f"has_{what}": array is not None for what, array in affine._asdict().items()},
        eps=0.0 if norm is None else norm.eps,
        limit=LIMIT,
        **arguments,
    )
    return result
