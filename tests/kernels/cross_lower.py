"""Lowering for an NVIDIA GPU on a machine without one.

This catches what the kernel language rejects: shapes, dtypes, operations, ranks. Errors of the GPU's own
compiler (registers, shared memory) show only on a GPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import TileSpec, page_shape, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.shapes import Heads

_DEPRECATED = "The Pallas Triton backend is deprecated"


def mesh_of_gpus(num_devices: int) -> jax.sharding.AbstractMesh:
    """Return an abstract mesh of H200s with the models' axis."""
    axis_types = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh(
        (num_devices,), ("tp",), axis_types=axis_types, abstract_device=_gpu("NVIDIA H200")
    )


def _gpu(device_kind: str) -> jax.sharding.AbstractDevice:
    return jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=None, platform="cuda")


def lower_for_cuda(
    fn: Callable[..., Any],
    *args: Any,
    device_kind: str = "NVIDIA H200",
    mesh: jax.sharding.AbstractMesh | None = None,
) -> str:
    """Return the StableHLO of `fn` for a GPU or `mesh`; `args` are arrays or `jax.ShapeDtypeStruct`s."""
    if mesh is None:
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=_gpu(device_kind))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def lower_byte_attention(spec: TileSpec, heads: Heads, *, has_sinks: bool = False) -> str:
    """Lower a bfloat16 step over a pool of 4 GiB of pages in 8 bits, with rows of up to 128 pages."""
    page = page_shape(spec.kv_dtype, spec.page_size, heads.num_kv_heads, heads.head_dim)

    def attend(sinks: jax.Array, *args: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *args[:-1], sm_scale=0.1, window=spec.window, sinks=sinks if has_sinks else None,
            metadata=(spec, args[-1]), kv_dtype=spec.kv_dtype,
        )  # fmt: skip

    shape, rows = jax.ShapeDtypeStruct, spec.max_num_seqs
    pool = shape((2**32 // math.prod(page), *page), jnp.int8)
    q = shape((spec.num_tokens, heads.num_q_heads, heads.head_dim), jnp.bfloat16)
    sizes = ((rows,), (rows, 128), (rows + 1,), (1,), (spec.tiles_len,))
    sinks = shape((heads.num_q_heads,), jnp.float32)
    return lower_for_cuda(attend, sinks, q, pool, *(shape(size, jnp.int32) for size in sizes))
