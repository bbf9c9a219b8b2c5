"""Ragged paged attention through Pallas' Mosaic GPU back end, for NVIDIA Hopper and 16-bit types.

Owns: the launches of the Mosaic tile classes, and the fetching part of the kernel for prompts. Does not know:
how tiles are chosen (`tile_lists`), how attention is computed (`mosaic_compute`, `mosaic_bytes`), how codes
are converted (`mosaic_convert`), or how split key ranges are merged. Called by: `api`.

A program stays on its multiprocessor and computes many items; an item is one tile and one KV head. One
warpgroup fetches keys and values page by page through the tensor memory accelerator (TMA) into a ring of
blocks. The ring continues across items, so the next item's keys arrive while this one ends. The other
warpgroups compute, 64 rows each. Pages in 8 bits are fetched into a ring of codes, from which one more
warpgroup makes the blocks for the others.

The rows of a tile are in head-major order, not token by token as in the Triton kernel. So the tokens of one
head are consecutive rows, which a single copy moves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention import mosaic_launch
from pallas_kernels.ragged_paged_attention.mosaic_bytes import byte_attention_of
from pallas_kernels.ragged_paged_attention.mosaic_compute import compute
from pallas_kernels.ragged_paged_attention.mosaic_convert import convert
from pallas_kernels.ragged_paged_attention.mosaic_launch import (
    COLUMNS,
    TILES,
    BlockRing,
    Codes,
    Inputs,
    Item,
    KernelLaunch,
    Shared,
    for_each_item,
    page_ids,
)
from pallas_kernels.ragged_paged_attention.tile_specs import WARPGROUP_ROWS, TileSpec, result_shapes

# Registers per thread of the computing, fetching and converting warpgroups, by the number of computing
# warpgroups. Together they fill the register file. A program of only two warpgroups needs no entry, since its
# threads already have the most registers that a thread may have.
_REGISTERS, _BYTE_REGISTERS = {2: (240, 24)}, {1: (240, 24, 128), 2: (216, 24, 56)}

# The bytes that `TILES` describes, seen row by row: queries are copied in runs of rows.
_ROWS = (plgpu.TilingTransform((COLUMNS,)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]


def mosaic_attention(
    spec: TileSpec,
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    tiles: jax.Array,
    scratch: jax.Array | None,
    *,
    sm_scale: float,
    sinks: jax.Array | None,
    interpret: bool,
) -> list[jax.Array]:
    """Compute attention over the tiles of every class marked `mosaic` or `in_bytes`.

    Arguments are as in `api.ragged_paged_attention`, and already checked; `tiles` is i32[spec.tiles_len], and
    `scratch` is the pool of `decode_pages` if the spec has one.

    Returns:
      Results like q, partial results f32[num_partial_rows, head_dim] and their log-sum-exps in base 2
      f32[num_partial_rows]. Rows of other classes are arbitrary. The list is empty if no class is marked.
    """
    head_dim = q.shape[2]
    # Two dimensions: a page is a run of rows, a head's keys or values are a run of columns.
    flat_kv = kv_pages.reshape(-1, kv_pages.shape[2] * head_dim)
    inputs = (tiles, page_indices.reshape(-1), q, flat_kv)
    others = () if sinks is None else (sinks,)
    buffers: list[jax.Array] = []
    for index, tile_class in enumerate(spec.blocks.classes):
        if not (tile_class.mosaic or tile_class.in_bytes):
            continue
        scale = sm_scale * math.log2(math.e)
        launch = KernelLaunch(
            spec, index, page_indices.shape[1], head_dim, scale, q.dtype, interpret, has_sinks=bool(others)
        )
        own = inputs
        if scratch is not None and not tile_class.in_bytes:
            # Pages of 16 bits. A tile says where the flat array has its row's pages, so that is their table.
            launch = dataclasses.replace(
                launch, spec=dataclasses.replace(spec, kv_dtype=None), pages_per_seq=1
            )
            own = (tiles, tiles, q, scratch.reshape(-1, flat_kv.shape[1]))
        # A class writes only its own rows; later classes continue in the buffers of the first.
        refs = [jax.new_ref(buffer) for buffer in buffers]
        kernel_of = byte_attention_of if tile_class.decodes_bytes else _attention_of
        outputs = kernel_of(launch, () if refs else result_shapes(spec, q))(*own, *others, *refs)
        buffers = [jax.freeze(ref) for ref in refs] or list(outputs)
    return buffers


@functools.cache
def _attention_of(launch: KernelLaunch, out_type: Any) -> Callable[..., Any]:
    """Return the kernel of a tile class as a jitted function of `Inputs`.

    `out_type` describes the outputs; it is empty if the inputs include the buffers to write. The kernel is
    cached: a model calls it in every layer, but tracing and lowering, which take a second, happen once.
    """
    num_warpgroups, tile_class = launch.num_warpgroups, launch.tile_class
    num_squares, num_stages = len(launch.column_starts), tile_class.num_stages
    q_shape = (2, num_warpgroups, num_squares, WARPGROUP_ROWS, COLUMNS)
    kv_shape = (num_stages, tile_class.block_kv, launch.head_dim)
    q: Any = plgpu.SMEM(q_shape, launch.dtype, transforms=TILES)
    if not launch.interpret:  # in the interpreter the members of a union do not share memory
        q = plgpu.RefUnion(q, plgpu.SMEM(q_shape, launch.dtype, transforms=_ROWS))
    num_runs = num_warpgroups * (WARPGROUP_ROWS // launch.run_rows)
    # A block is complete when all its pages have arrived, or when the converting warpgroup has written it.
    num_arrivals = 1 if tile_class.in_bytes else launch.pages_per_block
    complete = plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_stages)
    read_by_all = functools.partial(plgpu.Barrier, num_arrivals=num_warpgroups)
    shared = Shared(
        q=q,
        k=plgpu.SMEM(kv_shape, launch.dtype, transforms=TILES),
        v=plgpu.SMEM(kv_shape, launch.dtype, transforms=TILES),
        q_ready=plgpu.Barrier(num_arrivals=num_runs * num_squares, num_barriers=2),
        q_free=read_by_all(num_barriers=2),
        k_ready=complete,
        k_free=read_by_all(num_barriers=num_stages),
        v_ready=complete,
        v_free=read_by_all(num_barriers=num_stages),
        turn=plgpu.Barrier(num_barriers=num_warpgroups),
        values_clean=read_by_all(),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=out_type,
        scratch_types={"shared": shared, "codes": _codes(launch) if tile_class.in_bytes else ()},
        grid=(mosaic_launch.NUM_PROGRAMS,),
        grid_names=("program",),
        num_threads=num_warpgroups + 1 + tile_class.in_bytes,
        thread_name="warpgroup",
        # The kernel has its own barriers where plain accesses of a warpgroup reuse shared memory. Maxima and
        # sums of rows are reduced over a few lanes, which needs no shared memory.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=plgpu.InterpretGPUParams() if launch.interpret else None,
        kernel_name="ragged_paged_attention_mosaic_" + "bytes_" * tile_class.in_bytes + f"{tile_class.rows}",
    )
    return jax.jit(kernel)


def _codes(launch: KernelLaunch) -> Codes:
    """Describe the shared memory for codes and their scales."""
    stages, pages = launch.num_code_stages, launch.pages_per_block
    ring = BlockRing(
        blocks=plgpu.SMEM((stages, launch.tile_class.block_kv, launch.head_dim), jnp.int8),
        ready=plgpu.Barrier(num_arrivals=2 * pages, num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
        scales=plgpu.SMEM((stages, pages, launch.head_dim), jnp.int8),
    )
    return Codes(ring, ring)


def _kernel(*refs: Any, launch: KernelLaunch, shared: Shared, codes: Codes | tuple[()]) -> None:
    """Run one program: its first warpgroups compute, the next one fetches, the last one converts codes."""
    inputs, num_warpgroups = Inputs.of(launch, refs), launch.num_warpgroups
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    registers: Any = (_BYTE_REGISTERS if codes else _REGISTERS).get(num_warpgroups)
    registers = None if launch.interpret else registers

    @pl.when(warpgroup < num_warpgroups)
    def compute_items() -> None:
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        compute(launch, inputs, shared, program, warpgroup)

    @pl.when(warpgroup == num_warpgroups)
    def fetch_items() -> None:
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        if codes:
            _fetch(launch, inputs, shared, program, codes, launch.num_code_stages)
        else:
            _fetch(launch, inputs, shared, program, shared.rings, launch.tile_class.num_stages)

    if codes:

        @pl.when(warpgroup == num_warpgroups + 1)
        def convert_items() -> None:
            if registers:
                plgpu.set_max_registers(registers[2], action="decrease")
            convert(launch, inputs, shared, codes, program)


def _fetch(
    launch: KernelLaunch,
    inputs: Inputs,
    shared: Shared,
    program: Any,
    rings: tuple[BlockRing, BlockRing],
    num_stages: int,
) -> None:
    """Copy the queries, keys and values of all items to shared memory as stages become free."""

    def fetch_item(i: Any, item: Item, blocks_before: Any) -> None:
        num_blocks = item.num_blocks(launch)
        ids = page_ids(launch, inputs, item, num_blocks - 1)
        _fetch_queries(launch, inputs, shared, item, lax.rem(i, 2))

        def fetch_block(n: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
            next_ids = page_ids(launch, inputs, item, num_blocks - 2 - n)
            _fetch_pages(launch, inputs, rings, item, lax.rem(blocks_before + n, num_stages), ids)
            return next_ids

        lax.fori_loop(0, num_blocks, fetch_block, ids)

    num_items, _ = for_each_item(launch, inputs, program, fetch_item)
    # Wait for the arrivals that are still outstanding, before the program ends.
    plgpu.barrier_wait(shared.q_free.at[lax.rem(num_items, 2)])
    for stage in range(num_stages):
        for ring in rings:
            plgpu.barrier_wait(ring.free.at[stage])


def _fetch_queries(launch: KernelLaunch, inputs: Inputs, shared: Shared, item: Item, buffer: Any) -> None:
    plgpu.barrier_wait(shared.q_free.at[buffer])
    for warpgroup in range(launch.num_warpgroups):
        for row, head, token in launch.runs(warpgroup):
            # Tokens past the tile belong to other tiles, or are zeros. Their results are not stored.
            tokens = pl.ds(item.token + token, launch.run_rows)
            if launch.has_spare_heads:  # padding repeats the last head's rows, which are not stored
                head = jnp.minimum(head, launch.spec.group - 1)
            for square, column in enumerate(launch.column_starts):
                plgpu.copy_gmem_to_smem(
                    inputs.q.at[tokens, item.head * launch.spec.group + head, pl.ds(column, COLUMNS)],
                    shared.q_rows(launch).at[buffer, warpgroup, square, pl.ds(row, launch.run_rows)],
                    shared.q_ready.at[buffer],
                )


def _fetch_pages(
    launch: KernelLaunch,
    inputs: Inputs,
    rings: tuple[BlockRing, BlockRing],
    item: Item,
    stage: Any,
    ids: tuple[Any, ...],
) -> None:
    """Copy a block's keys and values page by page; for codes also their scales."""
    page_size, head_dim = launch.spec.page_size, launch.head_dim
    page_rows = launch.spec.page_rows(head_dim)
    for is_value, ring in enumerate(rings):
        ready = ring.ready.at[stage]
        plgpu.barrier_wait(ring.free.at[stage])
        columns = pl.ds((2 * item.head + is_value) * head_dim, head_dim)
        for p, page in enumerate(ids):
            tokens = inputs.kv.at[pl.ds(page * page_rows, page_size), columns]
            plgpu.copy_gmem_to_smem(tokens, ring.blocks.at[stage, pl.ds(p * page_size, page_size)], ready)
            if ring.scales is not None:
                scales = inputs.kv.at[pl.ds(page * page_rows + page_size, 1), columns]
                plgpu.copy_gmem_to_smem(scales, ring.scales.at[stage, pl.ds(p, 1)], ready)
