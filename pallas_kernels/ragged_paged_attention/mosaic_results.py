"""Output of a computing warpgroup's rows in the Mosaic kernel.

Owns: the copies of a tile's results, or of a part's sums, to global memory.
Does not know: how they were computed. Called by: `mosaic_compute`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_launch import COLUMNS, Inputs, Item, KernelLaunch, Shared
from pallas_kernels.ragged_paged_attention.tile_specs import WARPGROUP_ROWS


def store_rows(
    launch: KernelLaunch,
    inputs: Inputs,
    shared: Shared,
    item: Item,
    warpgroup: Any,
    buffer: Any,
    acc: Any,
    lse: Any,
) -> None:
    """Store acc f32[64, head_dim] as results, or with lse f32[64] as a part of a split range."""

    @pl.when(item.slot < 0)
    def store_result() -> None:
        _stage_result(launch, shared, warpgroup, buffer, acc)
        _copy_result(launch, inputs, shared, item, warpgroup, buffer)

    @pl.when(item.slot >= 0)
    def store_part() -> None:
        # All rows are stored: the merge skips those that belong to no token.
        tile = item.slot * launch.spec.num_kv_heads + item.head
        first = launch.spec.partial_begin(launch.index) + tile * launch.tile_class.rows
        part = pl.ds(first + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        inputs.partial_out[part] = acc
        inputs.partial_lse[part] = lse


def _stage_result(launch: KernelLaunch, shared: Shared, warpgroup: Any, buffer: Any, acc: Any) -> None:
    """Store the rows in the buffer of the item's queries, which are no longer needed."""
    plgpu.commit_smem()  # a barrier: all four warps are done with the queries
    result = acc.astype(launch.dtype)
    for square, column in enumerate(launch.column_starts):
        target = shared.q_tiles(launch).at[buffer, warpgroup, square]
        target[...] = result[:, column : column + COLUMNS]
    plgpu.commit_smem()


def _copy_result(
    launch: KernelLaunch, inputs: Inputs, shared: Shared, item: Item, warpgroup: Any, buffer: Any
) -> None:
    """Copy only the rows of the tile's tokens to global memory."""

    def copy(row: Any, head: Any, token: Any, num_rows: int) -> None:
        tokens, head = pl.ds(item.token + token, num_rows), item.head * launch.spec.group + head
        for square, column in enumerate(launch.column_starts):
            source = shared.q_rows(launch).at[buffer, warpgroup, square, pl.ds(row, num_rows)]
            plgpu.copy_smem_to_gmem(source, inputs.out.at[tokens, head, pl.ds(column, COLUMNS)])

    @pl.when(item.num_tokens == launch.tile_tokens)
    def copy_all() -> None:
        for row, head, token in launch.runs(warpgroup):
            whole = functools.partial(copy, row, head, token, launch.run_rows)
            if launch.has_spare_heads:
                pl.when(head < launch.spec.group)(whole)
            else:
                whole()

    @pl.when(item.num_tokens < launch.tile_tokens)
    def copy_some() -> None:
        for run in launch.runs(warpgroup):
            num_rows = jnp.clip(item.num_tokens - run[2], 0, launch.run_rows)
            if launch.has_spare_heads:
                num_rows = jnp.where(run[1] < launch.spec.group, num_rows, 0)

            @pl.loop(0, num_rows)
            def copy_token(t: Any, run: tuple[int, Any, Any] = run) -> None:
                row, head, token = run
                copy(row + t, head, token + t, 1)
