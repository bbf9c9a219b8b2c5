"""Launches of the sums' kernels through jax-triton: NVIDIA GPUs from Ampere on.

Owns: the arguments of a launch. Does not know: what the kernels do with them.
Called by: `api`, which imports this file only where it is needed: jax-triton and Triton come with the extra
`triton`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton

from pallas_kernels.all_reduce import jax_triton_kernels as kernels
from pallas_kernels.all_reduce.specs import LIMIT, NUM_PROGRAMS, NUM_PROGRAMS_MANY

# As of ragged_paged_attention.jax_triton: JAX assembles PTX with the CUDA it runs on.
_OPTIONS = {"ptx_version": 88, "enable_fp_fusion": True}
_NUM_WARPS = 8


def triton_sum(
    partial: jax.Array,
    table: jax.Array,
    stream: jax.Array | None,
    scale: jax.Array | None,
    *,
    num_devices: int,
    capacity: int,
    eps: float = 0.0,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api`; arguments are already checked. Without a stream the second result means nothing."""
    num_rows, width = partial.shape
    norms = stream is not None and scale is not None
    empty = jax.ShapeDtypeStruct((1,), partial.dtype)
    normed = jax.ShapeDtypeStruct(partial.shape, dtype) if norms else empty
    total = jax.ShapeDtypeStruct(partial.shape, jnp.float32 if norms else partial.dtype)
    return _launch(
        kernels.sum_of_rows,
        (partial, table, partial if stream is None else stream, partial if scale is None else scale),
        (total, normed),
        num_programs=NUM_PROGRAMS,
        name="sum_and_norm" if norms else "sum_over_devices",
        num_rows=num_rows,
        capacity=capacity,
        width=width,
        num_devices=num_devices,
        norms=norms,
        eps=eps,
    )


def triton_shares(
    partial: jax.Array,
    table: jax.Array,
    share: jax.Array,
    scale: jax.Array,
    *,
    num_devices: int,
    eps: float,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """See `api`; arguments are already checked."""
    num_rows, width = share.shape
    stream = jax.ShapeDtypeStruct(share.shape, jnp.float32)
    return _launch(
        kernels.shares_of_rows,
        (partial, table, share, scale),
        (stream, jax.ShapeDtypeStruct(partial.shape, dtype)),
        num_programs=NUM_PROGRAMS_MANY,
        name="sum_and_norm_of_shares",
        num_rows=num_rows,
        width=width,
        num_devices=num_devices,
        eps=eps,
    )


def _launch(
    kernel: Any,
    arrays: tuple[jax.Array, ...],
    out_type: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
    *,
    num_programs: int,
    name: str,
    width: int,
    **arguments: Any,
) -> tuple[jax.Array, jax.Array]:
    """What both kernels are launched with; `arguments` are a kernel's own."""
    result: tuple[jax.Array, jax.Array] = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_type=out_type,
        grid=(num_programs,),
        name=name,
        num_warps=_NUM_WARPS,
        num_stages=1,
        backend_options=_OPTIONS,
        width=width,
        block=1 << (width - 1).bit_length(),
        limit=LIMIT,
        **arguments,
    )
    return result
