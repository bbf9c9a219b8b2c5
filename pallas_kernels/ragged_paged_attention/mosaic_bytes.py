"""Decode attention over pages in 8 bits, for NVIDIA Hopper, bfloat16 queries and heads of 128.

Owns: the kernel of the tile classes marked `in_bytes`: its shared memory, its fetching and computing
warpgroups, and the output of results. Does not know: what a computing thread does with a block
(`mosaic_byte_lanes`), how items are dealt (`mosaic_launch`), or how split key ranges are merged.
Called by: `pallas_mosaic_gpu`.

A program is persistent on its multiprocessor, as in the kernel for 16 bits. But it has several *pairs* of
warpgroups, each with its own ring: one fetches, the other computes. While one pair ends an item, or waits for
an instruction's result, the others continue. The pairs form one program, since only warpgroups of the same
program can give registers to each other. Rows are token by token, as in the Triton kernel.
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

from pallas_kernels.ragged_paged_attention import mosaic_launch
from pallas_kernels.ragged_paged_attention.interpreted_threads import run_interpreted
from pallas_kernels.ragged_paged_attention.mosaic_byte_lanes import (
    HEAD_DIM,
    NUM_WARPS,
    TILE_ROWS,
    LaneShape,
    add_block,
    empty_sums,
    finish,
    load_queries,
)
from pallas_kernels.ragged_paged_attention.mosaic_launch import (
    Inputs,
    Item,
    KernelLaunch,
    for_each_item,
    page_ids,
)
from pallas_kernels.ragged_paged_attention.mosaic_threads import run_threads

# Registers of a thread that computes, and of one that fetches, by the number of pairs. Their sum is twice the
# initial number per thread, which follows from the number of threads.
_REGISTERS = {2: (216, 40), 3: (120, 40)}
# Codes are in rows of 128 bytes, which the hardware swizzles, and not in tiles of eight rows, since a page
# may start at any row. (Upstream's annotations make these classes abstract.)
_CODES = (plgpu.TilingTransform((HEAD_DIM,)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
_LSE_STRIDE = 32  # elements between pairs: a copy starts at a multiple of 128 bytes


class _Shared(NamedTuple):
    """References to shared memory, and its barriers, each for all pairs."""

    q: Any  # bf16[2 * pairs, rows, 128]; an item's result leaves through its queries' buffer
    kv: Any  # i8[pairs * num_stages, block_kv, 256]: each key followed by its value
    scales: Any  # i8[pairs * num_stages, pages_per_block, 256]
    rows: Any  # f32[pairs, 4, 2, rows]
    slabs: Any  # f32[pairs, 2, rows, 128]
    lse: Any  # f32[pairs, 32]
    q_ready: Any  # one for each buffer
    q_free: Any
    ready: Any  # one for each stage
    free: Any


@functools.cache
def byte_attention_of(launch: KernelLaunch, out_type: Any) -> Callable[..., Any]:
    """Return the kernel of a class as a jitted function of `Inputs`; `out_type` describes missing inputs."""
    pairs, tile_class = launch.num_pairs, launch.tile_class
    stages, rows = pairs * tile_class.num_stages, tile_class.rows
    kv_shape = (stages, tile_class.block_kv, 2 * HEAD_DIM)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=out_type,
        scratch_types=_Shared(
            q=plgpu.SMEM((2 * pairs, rows, HEAD_DIM), launch.dtype),
            kv=plgpu.SMEM(kv_shape, jnp.int8, transforms=_CODES),
            scales=plgpu.SMEM((stages, launch.pages_per_block, 2 * HEAD_DIM), jnp.int8),
            rows=plgpu.SMEM((pairs, NUM_WARPS, 2, rows), jnp.float32),
            slabs=plgpu.SMEM((pairs, 2, rows, HEAD_DIM), jnp.float32),
            lse=plgpu.SMEM((pairs, _LSE_STRIDE), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=launch.tile_tokens, num_barriers=2 * pairs),
            q_free=plgpu.Barrier(num_barriers=2 * pairs),
            ready=plgpu.Barrier(num_arrivals=2 * launch.pages_per_block, num_barriers=stages),
            free=plgpu.Barrier(num_barriers=stages),
        )._asdict(),
        grid=(mosaic_launch.NUM_PROGRAMS,),
        grid_names=("program",),
        num_threads=2 * pairs,
        thread_name="warpgroup",
        # There is an explicit barrier wherever threads read by plain accesses what others wrote that way.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=plgpu.InterpretGPUParams() if launch.interpret else None,
        kernel_name=f"ragged_paged_attention_bytes_{rows}",
    )
    return jax.jit(kernel)


def _kernel(*refs: Any, launch: KernelLaunch, **scratch: Any) -> None:
    """Run one program: the first half of its warpgroups computes, the second half fetches."""
    inputs, shared = Inputs.of(launch, refs), _Shared(**scratch)
    warpgroup, pairs = lax.axis_index("warpgroup"), launch.num_pairs
    pair = lax.rem(warpgroup, pairs)
    part = _Pair(launch, inputs, shared, pair, lax.axis_index("program") + pair * mosaic_launch.NUM_PROGRAMS)
    registers = None if launch.interpret else _REGISTERS.get(pairs)

    @pl.when(warpgroup < pairs)
    def compute_items() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        part.compute()

    @pl.when(warpgroup >= pairs)
    def fetch_items() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")
        part.fetch()


class _Pair(NamedTuple):
    """Two warpgroups: one fetches, the other computes."""

    launch: KernelLaunch
    inputs: Inputs
    shared: _Shared
    pair: Any
    program: Any  # counted over all pairs of all programs

    @property
    def shape(self) -> LaneShape:
        spec, tile_class = self.launch.spec, self.launch.tile_class
        assert spec.kv_dtype is not None
        num_tiles = tile_class.rows // TILE_ROWS
        sizes = (spec.page_size, spec.group, tile_class.block_kv, num_tiles, self.launch.scale)
        return LaneShape(spec.kv_dtype, *sizes, spec.window)

    def stage(self, block: Any) -> Any:
        """Return the stage of a block; blocks are counted over all items of this pair."""
        return self.pair * self.launch.tile_class.num_stages + self.launch.stage_of(block)

    def buffer(self, i: Any) -> Any:
        """Return the buffer of the queries of this pair's i-th item."""
        return self.pair * 2 + lax.rem(i, 2)

    def fetch(self) -> None:
        """Copy the queries, keys and values of all items to shared memory as stages become free."""

        def fetch_item(i: Any, item: Item, blocks_before: Any) -> None:
            num_blocks = item.num_blocks(self.launch)
            ids = page_ids(self.launch, self.inputs, item, num_blocks - 1)
            self.fetch_queries(item, self.buffer(i))

            def fetch_block(n: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
                next_ids = page_ids(self.launch, self.inputs, item, num_blocks - 2 - n)
                self.fetch_pages(item, self.stage(blocks_before + n), ids)
                return next_ids

            lax.fori_loop(0, num_blocks, fetch_block, ids)

        num_items, _ = for_each_item(self.launch, self.inputs, self.program, fetch_item)
        # Wait for every arrival, also the last ones.
        plgpu.barrier_wait(self.shared.q_free.at[self.buffer(num_items)])
        for block in range(self.launch.tile_class.num_stages):
            plgpu.barrier_wait(self.shared.free.at[self.stage(block)])

    def fetch_queries(self, item: Item, buffer: Any) -> None:
        """Copy a tile's queries. Rows after its own belong to other tiles; their results are not stored."""
        group, last = self.launch.spec.group, self.launch.spec.num_tokens - 1
        plgpu.barrier_wait(self.shared.q_free.at[buffer])
        for token in range(self.launch.tile_tokens):
            plgpu.copy_gmem_to_smem(
                self.inputs.q.at[jnp.minimum(item.token + token, last), pl.ds(item.head * group, group)],
                self.shared.q.at[buffer, pl.ds(token * group, group)],
                self.shared.q_ready.at[buffer],
            )

    def fetch_pages(self, item: Item, stage: Any, ids: tuple[Any, ...]) -> None:
        """Copy the codes of keys and values, and the scales of both, page by page."""
        page_size, columns = self.launch.spec.page_size, pl.ds(item.head * (2 * HEAD_DIM), 2 * HEAD_DIM)
        shared, ready = self.shared, self.shared.ready.at[stage]
        plgpu.barrier_wait(shared.free.at[stage])
        for p, page in enumerate(ids):
            first = page * self.launch.spec.page_rows(HEAD_DIM)
            tokens, scales = self.inputs.kv.at[pl.ds(first, page_size), columns], pl.ds(first + page_size, 1)
            plgpu.copy_gmem_to_smem(tokens, shared.kv.at[stage, pl.ds(p * page_size, page_size)], ready)
            plgpu.copy_gmem_to_smem(
                self.inputs.kv.at[scales, columns], shared.scales.at[stage, pl.ds(p, 1)], ready
            )

    def compute(self) -> None:
        """Compute attention of all items of this pair."""
        plgpu.barrier_arrive(self.shared.q_free.at[self.buffer(0)])
        for block in range(self.launch.tile_class.num_stages):
            plgpu.barrier_arrive(self.shared.free.at[self.stage(block)])

        def compute_item(i: Any, item: Item, blocks_before: Any) -> None:
            self.attend(i, item, blocks_before)
            self.store(item, self.buffer(i))

        for_each_item(self.launch, self.inputs, self.program, compute_item)
        plgpu.wait_smem_to_gmem(0)

    def attend(self, i: Any, item: Item, blocks_before: Any) -> None:
        """Compute one item, with blocks from the last to the first, so that masks come at the start."""
        shape, shared, buffer = self.shape, self.shared, self.buffer(i)
        num_blocks, block_kv = item.num_blocks(self.launch), self.launch.tile_class.block_kv
        seen_by_all = jnp.minimum(item.position + 1, item.kv_end) - item.kv_begin
        num_masked = num_blocks - lax.div(jnp.maximum(seen_by_all, 0), block_kv)
        num_seen = num_blocks  # blocks before those in which windows begin
        if shape.window is not None:
            num_seen = jnp.maximum(num_blocks - item.num_window_blocks(self.launch), num_masked)
        plgpu.barrier_wait(shared.q_ready.at[buffer])
        queries = self.run(
            lambda threads, refs, numbers, _: load_queries(threads, shape, *refs, *numbers),
            [shared.q.at[buffer]], [item.position, item.kv_end],
            result=(jnp.int32, shape.num_query_registers),
        )  # fmt: skip
        # The other buffer is free: the result of the item before has left it after the wait, or it was never
        # used.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.q_free.at[self.buffer(i + 1)])

        def step(block: Any, sums: Any, *, masked: bool) -> Any:
            stage = self.stage(blocks_before + block)
            first_key = item.kv_begin + (num_blocks - 1 - block) * block_kv
            plgpu.barrier_wait(shared.ready.at[stage])
            sums = self.run(
                lambda threads, refs, numbers, lists: add_block(
                    threads, shape, *refs, *numbers, *lists, masked=masked
                ),
                [shared.kv.at[stage], shared.scales.at[stage]], [first_key], [queries, sums],
                (jnp.float32, shape.num_sum_registers), has_codes=True,
            )  # fmt: skip
            if self.launch.interpret:
                # The race detector requires a fence between plain reads and a later copy to the same place.
                # On hardware, data in registers has been read, so no fence is needed; CUTLASS' pipelines have
                # none either.
                plgpu.commit_smem()
            plgpu.barrier_arrive(shared.free.at[stage])
            return sums

        sums = self.run(lambda *_: empty_sums(shape), result=(jnp.float32, shape.num_sum_registers))
        sums = lax.fori_loop(0, num_masked, functools.partial(step, masked=True), sums)
        sums = lax.fori_loop(num_masked, num_seen, functools.partial(step, masked=False), sums)
        if shape.window is not None:
            sums = lax.fori_loop(num_seen, num_blocks, functools.partial(step, masked=True), sums)
        sinks = []
        if self.launch.has_sinks:
            sinks = [self.inputs.sink(self.launch, item, head) for head in range(shape.group)]
        refs = [shared.rows.at[self.pair], shared.slabs.at[self.pair], shared.q.at[buffer]]
        refs.append(shared.lse.at[self.pair])
        self.run(
            lambda threads, refs, sinks, lists: finish(threads, shape, *(*refs, *lists, sinks)),
            refs, sinks, [sums],
        )  # fmt: skip

    def run(
        self,
        program: Callable[..., Any],
        refs: list[Any] | None = None,
        scalars: list[Any] | None = None,
        registers: list[Any] | None = None,
        result: Any | None = None,
        *,
        has_codes: bool = False,
    ) -> Any:
        """Run `program` by `run_threads` or its interpreter; `has_codes`: the first reference is of codes."""
        refs, scalars, registers = refs or [], scalars or [], registers or []
        if self.launch.interpret:
            return run_interpreted(program, refs, scalars, registers, result)
        typed = [(ref, _CODES if has_codes and i == 0 else ()) for i, ref in enumerate(refs)]
        return run_threads(program, typed, scalars, registers, result)

    def store(self, item: Item, buffer: Any) -> None:
        """Copy a tile's rows, or those of a part, to global memory."""
        plgpu.commit_smem()
        spec, shared, inputs = self.launch.spec, self.shared, self.inputs

        @pl.when(item.slot < 0)
        def store_result() -> None:
            heads = pl.ds(item.head * spec.group, spec.group)
            for token in range(self.launch.tile_tokens):
                source = shared.q.at[buffer, pl.ds(token * spec.group, spec.group)]
                target = inputs.out.at[item.token + token, heads]
                pl.when(token < item.num_tokens)(functools.partial(plgpu.copy_smem_to_gmem, source, target))

        @pl.when(item.slot >= 0)
        def store_part() -> None:
            # All rows are stored: the merge skips those that belong to no token.
            num_rows = self.launch.tile_class.rows
            tile = item.slot * spec.num_kv_heads + item.head
            rows = pl.ds(spec.partial_begin(self.launch.index) + tile * num_rows, num_rows)
            plgpu.copy_smem_to_gmem(shared.slabs.at[self.pair, 0], inputs.partial_out.at[rows])
            plgpu.copy_smem_to_gmem(shared.lse.at[self.pair, pl.ds(0, num_rows)], inputs.partial_lse.at[rows])
