"""One grouped product through Pallas' Mosaic GPU back end, for NVIDIA Hopper and bfloat16.

Owns: the kernel. Does not know: which tile is best, or how rows were grouped. Called by: `api`.

A program stays on its multiprocessor and computes many items; an item is a block of rows of one expert and
some columns. One warpgroup fetches blocks of x and w through the tensor memory accelerator (TMA) into a ring
in shared memory, which continues across items; the others multiply. Blocks of one expert with the same
columns are neighbours in the order of items, so they run at the same time and read the weights from memory
once.

No sum is split among programs, and no row of a product reads another. So a row has the same bits whatever is
computed beside it. A copy may bring rows of the next expert, or arbitrary memory past the last one; their
results are not stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.groups import (
    EXPERT,
    FIRST_BLOCK,
    FIRST_ROW,
    HEADER_LEN,
    NUM_FIELDS,
    NUM_ROWS,
    PIECE_ROWS,
    GroupSpec,
)
from pallas_kernels.grouped_matmul.tiles import INSTRUCTION_ROWS, SWIZZLED, ExpertTile

# (Upstream's annotations make these classes abstract.)
_TILES = (plgpu.TilingTransform((8, SWIZZLED)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# Registers of a thread that multiplies, and of one that fetches, if two warpgroups multiply.
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 232, 40


class _Launch(NamedTuple):
    """Static parameters of a compiled kernel."""

    num_rows: int
    depth: int
    width: int
    gated: bool
    tile: ExpertTile
    num_programs: int
    interpret: bool

    @property
    def num_parts(self) -> int:
        """Ranges of w's rows that an item reads: two (gate and up) or one."""
        return 1 + self.gated

    @property
    def num_k(self) -> int:
        """Blocks along the dimension that is summed."""
        return self.depth // self.tile.block_k

    @property
    def num_tiles(self) -> int:
        """Items of a block of rows."""
        return self.width // self.tile.columns

    @property
    def result_shape(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of an item."""
        tile = self.tile
        return (tile.rows, INSTRUCTION_ROWS) if tile.swapped else (INSTRUCTION_ROWS, tile.columns)


class _Refs(NamedTuple):
    """References to global and shared memory, and the barriers for each stage of the ring."""

    x: Any  # [num_rows, depth]
    w: Any  # [num_experts * num_parts * width, depth]
    blocks: Any  # i32[list_len]
    out: Any  # [num_rows, width]
    x_ring: Any  # [num_stages, rows, block_k]
    w_ring: Any  # [num_stages, num_parts, columns, block_k]
    result: Any  # [num_warpgroups, *result_shape]
    ready: Any
    free: Any


class _Item(NamedTuple):
    """A block of rows of one expert, and the first column."""

    expert: Any
    first_row: Any
    num_rows: Any  # at most the rows of a tile
    column: Any


def mosaic_grouped_matmul(
    spec: GroupSpec,
    x: jax.Array,
    w: jax.Array,
    *,
    blocks: jax.Array,
    tile: ExpertTile,
    gated: bool,
    num_programs: int,
    interpret: bool,
) -> jax.Array:
    """Return `x @ w.T` of each row's expert, or `silu(x @ gate.T) * (x @ up.T)`; rounded once.

    Args:
      spec: sizes of `blocks`.
      x: [num_rows, depth], grouped by expert.
      w: [num_experts * width, depth], or if gated [num_experts * 2 * width, depth], the gate of each first.
      blocks: the list.
      tile: tile of an item.
      gated: compute the second form (SwiGLU).
      num_programs: programs of the launch.
      interpret: run without a GPU.

    Returns:
      [num_rows, width]. Rows that belong to no expert are arbitrary.
    """
    num_rows, depth = x.shape
    width = w.shape[0] // (spec.num_experts * (1 + gated))
    launch = _Launch(num_rows, depth, width, gated, tile, num_programs, interpret)
    result: jax.Array = _kernel_of(launch)(x, w, blocks)
    return result


@functools.cache
def _kernel_of(launch: _Launch) -> Callable[..., jax.Array]:
    """Return the jitted kernel, cached: a model calls it in every layer, but it is lowered only once."""
    tile = launch.tile
    ring = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_TILES)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=jax.ShapeDtypeStruct((launch.num_rows, launch.width), jnp.bfloat16),
        scratch_types={
            "x_ring": ring((tile.num_stages, tile.rows, tile.block_k)),
            "w_ring": ring((tile.num_stages, launch.num_parts, tile.columns, tile.block_k)),
            "result": ring((tile.num_warpgroups, *launch.result_shape)),
            "ready": plgpu.Barrier(num_arrivals=1 + launch.num_parts, num_barriers=tile.num_stages),
            "free": plgpu.Barrier(num_arrivals=tile.num_warpgroups, num_barriers=tile.num_stages),
        },
        grid=(launch.num_programs,),
        grid_names=("program",),
        num_threads=tile.num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if launch.interpret else None,
        kernel_name=f"grouped_matmul_{'gated_' * launch.gated}{'swapped_' * tile.swapped}{tile.rows}",
    )
    return jax.jit(kernel)


def _kernel(*args: Any, launch: _Launch, **scratch: Any) -> None:
    """Run one program: its last warpgroup fetches, the others multiply."""
    refs, num_warpgroups = _Refs(*args, **scratch), launch.tile.num_warpgroups
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    # With one warpgroup of each kind every thread already has the most registers that a thread can have.
    moves_registers = num_warpgroups > 1 and not launch.interpret

    @pl.when(warpgroup == num_warpgroups)
    def fetch() -> None:
        if moves_registers:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
        _fetch(launch, refs, program)

    @pl.when(warpgroup < num_warpgroups)
    def multiply() -> None:
        if moves_registers:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        _for_each_item(launch, refs, program, functools.partial(_multiply, launch, refs, warpgroup))


def _for_each_item(launch: _Launch, refs: _Refs, program: Any, body: Callable[[_Item, Any], None]) -> Any:
    """Call `body(item, first block of the ring)` for the program's items; return the number of ring blocks.

    Items are ordered by expert, then by columns, then by rows.
    """
    tile, num_tiles = launch.tile, launch.num_tiles
    num_items = refs.blocks[0] * num_tiles
    count = lax.div(num_items - program + (launch.num_programs - 1), launch.num_programs)

    def step(i: Any, _: None) -> None:
        index = program + i * launch.num_programs
        word = HEADER_LEN + lax.div(index, num_tiles) * NUM_FIELDS
        fields = [refs.blocks[word + field] for field in (EXPERT, FIRST_BLOCK, FIRST_ROW, NUM_ROWS)]
        expert, first_block, first_row, num_rows = fields
        num_blocks = lax.div(num_rows + (tile.rows - 1), tile.rows)
        inner = index - first_block * num_tiles
        column = lax.div(inner, num_blocks)
        start = (inner - column * num_blocks) * tile.rows
        rest = jnp.minimum(num_rows - start, tile.rows)
        body(_Item(expert, first_row + start, rest, column * tile.columns), i * launch.num_k)

    lax.fori_loop(0, count, step, None)
    return count * launch.num_k


def _fetch(launch: _Launch, refs: _Refs, program: Any) -> None:
    """Copy the blocks of x and w of all items as stages become free."""
    tile = launch.tile

    def fetch_item(item: _Item, first: Any) -> None:
        rows = pl.ds(pl.multiple_of(item.first_row, PIECE_ROWS), tile.rows)
        parts = [
            pl.ds((item.expert * launch.num_parts + part) * launch.width + item.column, tile.columns)
            for part in range(launch.num_parts)
        ]

        def fetch_block(k: Any, _: None) -> None:
            stage = lax.rem(first + k, tile.num_stages)
            pl.when(first + k >= tile.num_stages)(lambda: plgpu.barrier_wait(refs.free.at[stage]))
            along, ready = pl.ds(k * tile.block_k, tile.block_k), refs.ready.at[stage]
            for part, columns in enumerate(parts):
                plgpu.copy_gmem_to_smem(refs.w.at[columns, along], refs.w_ring.at[stage, part], ready)
            plgpu.copy_gmem_to_smem(refs.x.at[rows, along], refs.x_ring.at[stage], ready)

        lax.fori_loop(0, launch.num_k, fetch_block, None)

    def await_last(block: Any, _: None) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(block, tile.num_stages)])

    num_fetched = _for_each_item(launch, refs, program, fetch_item)
    # Wait for every arrival, also the last ones.
    lax.fori_loop(jnp.maximum(num_fetched - tile.num_stages, 0), num_fetched, await_last, None)


def _multiply(launch: _Launch, refs: _Refs, warpgroup: Any, item: _Item, first: Any) -> None:
    """Sum a warpgroup's part of an item and store it."""
    tile = launch.tile
    part_of = pl.ds(warpgroup * INSTRUCTION_ROWS, INSTRUCTION_ROWS)

    def with_sums(*sums: Any) -> None:
        def add_block(k: Any, _: None) -> None:
            stage = lax.rem(first + k, tile.num_stages)
            plgpu.barrier_wait(refs.ready.at[stage])
            for part, part_sums in enumerate(sums):
                if tile.swapped:
                    left, right = refs.w_ring.at[stage, part, part_of], refs.x_ring.at[stage]
                else:
                    left, right = refs.x_ring.at[stage, part_of], refs.w_ring.at[stage, part]
                plgpu.wgmma(part_sums, left, right.transpose((1, 0)))
            plgpu.wgmma_wait(len(sums))

            @pl.when(k > 0)
            def free_the_one_before() -> None:
                plgpu.barrier_arrive(refs.free.at[lax.rem(first + k - 1, tile.num_stages)])

        lax.fori_loop(0, launch.num_k, add_block, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs.free.at[lax.rem(first + launch.num_k - 1, tile.num_stages)])
        y = [part_sums[...] for part_sums in sums]
        total = (_silu(y[0]) * y[1] if launch.gated else y[0]).astype(jnp.bfloat16)
        _store(launch, refs, warpgroup, item, total)

    def pass_by(k: Any, _: None) -> None:
        stage = lax.rem(first + k, tile.num_stages)
        plgpu.barrier_wait(refs.ready.at[stage])
        plgpu.barrier_arrive(refs.free.at[stage])

    shape = (INSTRUCTION_ROWS, tile.rows if tile.swapped else tile.columns)
    multiply = functools.partial(
        pl.run_scoped, with_sums, *([plgpu.ACC(shape, jnp.float32)] * launch.num_parts)
    )
    if tile.swapped or tile.num_warpgroups == 1:
        multiply()
        return
    # The second warpgroup has no rows of a short block.
    has_rows = warpgroup * INSTRUCTION_ROWS < item.num_rows
    pl.when(has_rows)(multiply)
    pl.when(jnp.logical_not(has_rows))(lambda: lax.fori_loop(0, launch.num_k, pass_by, None))


def _store(launch: _Launch, refs: _Refs, warpgroup: Any, item: _Item, total: Any) -> None:
    """Store a warpgroup's part, in pieces of 8 rows; the block of the next expert may begin after any
    piece."""
    tile = launch.tile
    if tile.swapped:
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        refs.result.at[warpgroup].transpose((1, 0))[...] = total
        start, column = 0, item.column + warpgroup * INSTRUCTION_ROWS
    else:
        refs.result[warpgroup] = total
        start, column = warpgroup * INSTRUCTION_ROWS, item.column
    plgpu.commit_smem()
    num_rows, num_columns = launch.result_shape
    for piece in range(0, num_rows, PIECE_ROWS):

        @pl.when(start + piece < item.num_rows)
        def store_piece(piece: int = piece) -> None:
            to = pl.ds(pl.multiple_of(item.first_row + start + piece, PIECE_ROWS), PIECE_ROWS)
            source = refs.result.at[warpgroup, pl.ds(piece, PIECE_ROWS)]
            plgpu.copy_smem_to_gmem(source, refs.out.at[to, pl.ds(column, num_columns)])

    plgpu.wait_smem_to_gmem(0)


def _silu(x: Any) -> Any:
    return x / (1 + jnp.exp(-x))
