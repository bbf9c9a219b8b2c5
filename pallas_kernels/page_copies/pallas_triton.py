"""Page copies through Pallas' Triton back end, for NVIDIA GPUs from Ampere on.

Owns: the two kernels and their launches. Does not know: what a page number means beyond its range.
Called by: `api`, and `triton_packing` for the launches. Upstream has deprecated this back end, so nothing
outside these two files imports from it.

XLA must stack the chunks before it scatters them, or copies layer by layer: both are many small operations.
Here one launch moves a few chunks between their own arrays and all pools. The pools are separate buffers, so
a program compares its layer with each pool. A program moves one layer and one head row of every chunk of the
launch, so that several loads are in flight. The first chunk of a launch is an array argument, so all launches
of an executable share one kernel, which is compiled once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_MAX_CHUNKS_PER_LAUNCH = 4
_MAX_TILE_BYTES = 32 * 1024  # of all chunks that a program moves at once; its registers hold no more
_NUM_WARPS = 4


def triton_gather(pools: Sequence[jax.Array], pages: jax.Array, *, interpret: bool) -> list[jax.Array]:
    """See `api.gather_pages`; arguments are already checked."""
    chunks: list[jax.Array] = []
    for first, num_chunks in launches(pages.shape[0], _chunks_per_launch(pools[0])):
        chunks += _gather(list(pools), pages, first, num_chunks=num_chunks, interpret=interpret)
    return chunks


def triton_scatter(
    pools: Sequence[jax.Array], chunks: Sequence[jax.Array], pages: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """See `api.scatter_pages`; arguments are already checked."""
    scatter = functools.partial(_scatter, interpret=interpret)
    return in_launches(scatter, pools, chunks, pages, _chunks_per_launch(pools[0]))


def in_launches(
    scatter: Callable[..., list[jax.Array]],
    pools: Sequence[jax.Array],
    chunks: Sequence[jax.Array],
    pages: jax.Array,
    max_chunks: int,
) -> list[jax.Array]:
    """Return the pools after all launches of `scatter(pools, chunks of the launch, pages, first chunk)`."""
    updated, rest = list(pools), list(chunks)
    for first, num_chunks in launches(len(chunks), max_chunks):
        updated = scatter(updated, rest[:num_chunks], pages, first)
        rest = rest[num_chunks:]
    return updated


@functools.partial(jax.jit, static_argnames=("num_chunks", "interpret"))  # lowered once for all launches
def _gather(
    pools: list[jax.Array], pages: jax.Array, first: jax.Array, *, num_chunks: int, interpret: bool
) -> list[jax.Array]:
    """Run one launch that copies pages out of the pools, and return its chunks."""
    shape = (len(pools), *pools[0].shape[1:])
    return pl.pallas_call(
        functools.partial(_gather_kernel, num_pools=len(pools)),
        out_shape=[like(pools[0], shape, pools[0].dtype)] * num_chunks,
        grid=(len(pools), shape[2]),
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name=f"gather_pages_{num_chunks}",
    )(pages, first, *pools)


@functools.partial(jax.jit, static_argnames=("interpret",))
def _scatter(
    pools: list[jax.Array], chunks: list[jax.Array], pages: jax.Array, first: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """Run one launch that copies chunks into pages, and return the updated pools."""
    kernel = functools.partial(_scatter_kernel, num_chunks=len(chunks))
    grid = (len(pools), pools[0].shape[2])
    write = write_in_place(
        kernel, "scatter_pages", pools, len(chunks), _NUM_WARPS, grid=grid, interpret=interpret
    )
    return list(write(pages, first, *chunks, *pools))  # as `pools`: a compiled caller tells lists from tuples


def write_in_place(
    kernel: Callable[..., None],
    name: str,
    pools: Sequence[jax.Array],
    num_chunks: int,
    num_warps: int,
    *,
    grid: tuple[int, ...],
    interpret: bool,
) -> Callable[..., Any]:
    """Return a launch over `grid` that maps (pages, first, *chunks, *pools) to the updated pools."""
    num_inputs = 2 + num_chunks
    write: Callable[..., Any] = pl.pallas_call(
        kernel,
        out_shape=[like(pool, pool.shape, pool.dtype) for pool in pools],
        grid=grid,
        input_output_aliases={num_inputs + i: i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=f"{name}_{num_chunks}",
    )
    return write


def launches(num_chunks: int, max_chunks: int) -> Iterator[tuple[jax.Array, int]]:
    """Yield the first chunk, i32[1], and the number of chunks of every launch."""
    for first in range(0, num_chunks, max_chunks):
        yield jnp.full((1,), first, jnp.int32), min(max_chunks, num_chunks - first)


def _chunks_per_launch(pool: jax.Array) -> int:
    _, page_size, _, head_dim = pool.shape
    tile_bytes = page_size * head_dim * pool.dtype.itemsize
    return max(1, min(_MAX_CHUNKS_PER_LAUNCH, _MAX_TILE_BYTES // tile_bytes))


def like(pool: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Describe an array that is placed on devices as the pool is."""
    manual = jax.typeof(pool).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def _gather_kernel(pages_ref: Any, first_ref: Any, *refs: Any, num_pools: int) -> None:
    """Gather one layer and one head row of every chunk; `refs` are the pools, then the chunks."""
    pool_refs, chunk_refs = refs[:num_pools], refs[num_pools:]
    layer, head, first = pl.program_id(0), pl.program_id(1), first_ref[0]
    for pool_index, pool_ref in enumerate(pool_refs):

        @pl.when(layer == pool_index)
        def copy(pool_index: int = pool_index, pool_ref: Any = pool_ref) -> None:
            for rows in _row_runs(pool_ref.shape[1]):
                tiles = [pool_ref[pages_ref[first + i], rows, head, :] for i in range(len(chunk_refs))]
                for chunk_ref, tile in zip(chunk_refs, tiles, strict=True):
                    chunk_ref[pool_index, rows, head, :] = tile


def _scatter_kernel(pages_ref: Any, first_ref: Any, *refs: Any, num_chunks: int) -> None:
    """Scatter one layer and one head row of every chunk.

    `refs` are the chunks, the aliased pools (unused), then the pools.
    """
    chunk_refs, pool_refs = refs[:num_chunks], refs[num_chunks + (len(refs) - num_chunks) // 2 :]
    layer, head, first = pl.program_id(0), pl.program_id(1), first_ref[0]
    num_pages = pool_refs[0].shape[0]
    for pool_index, pool_ref in enumerate(pool_refs):

        @pl.when(layer == pool_index)
        def copy(pool_index: int = pool_index, pool_ref: Any = pool_ref) -> None:
            for rows in _row_runs(pool_ref.shape[1]):
                tiles = [chunk_ref[pool_index, rows, head, :] for chunk_ref in chunk_refs]
                for i, tile in enumerate(tiles):
                    page = pages_ref[first + i]

                    @pl.when((page > 0) & (page < num_pages))
                    def store(page: Any = page, tile: Any = tile, rows: Any = rows) -> None:
                        pool_ref[page, rows, head, :] = tile


def _row_runs(num_rows: int) -> Iterator[Any]:
    """Yield a page's rows in runs of powers of two, the longest first; Triton has no other block sizes."""
    start = 0
    for bit in reversed(range(num_rows.bit_length())):
        if num_rows & (1 << bit):
            yield pl.ds(start, 1 << bit)
            start += 1 << bit
