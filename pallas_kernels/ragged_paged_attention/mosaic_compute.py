"""The computing half of the Mosaic kernel: products, online softmax, masks.

Owns: the work of a computing warpgroup on its 64 rows of every item. Does not know: how queries, keys and
values reach shared memory (`pallas_mosaic_gpu`), or how results leave (`mosaic_results`).
Called by: `pallas_mosaic_gpu`.

Scores, weights and sums stay in registers. While a warpgroup computes the softmax of one block, the tensor
cores still sum the weighted values of the block before. Two warpgroups alternate in issuing products, so one
computes its softmax while the products of the other run. A warpgroup without tokens in a tile computes
nothing, but follows all barriers of the other. This overlap depends on the order of the lines that issue,
wait and hold registers; `step` gives the reason for each.

Blocks are processed from the last to the first, so that all masking happens at the start. With a window the
last blocks are masked as well. Slots past a row's keys may hold anything, NaN included. Their scores are
masked. But a weight of zero times NaN is NaN, so their values are zeroed in shared memory before the first
use. Pages before a window are not fetched (`mosaic_launch.page_ids`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_launch import (
    COLUMNS,
    Inputs,
    Item,
    KernelLaunch,
    Shared,
    for_each_item,
)
from pallas_kernels.ragged_paged_attention.mosaic_results import store_rows
from pallas_kernels.ragged_paged_attention.tile_specs import WARPGROUP_ROWS

# Hidden scores, and an initial maximum above these and below all visible scores: a row that has seen only
# hidden scores has weights of zero.
_MASKED, _NO_MAXIMUM = -1e30, -1e29
_LAYOUT = plgpu.Layout.WGMMA
# A thread holds two adjacent columns of every eight.
_OWN_COLUMNS = 8


def compute(launch: KernelLaunch, inputs: Inputs, shared: Shared, program: Any, warpgroup: Any) -> None:
    """Compute one warpgroup's rows of all items of a program."""
    plgpu.barrier_arrive(shared.q_free.at[0])
    for stage in range(launch.tile_class.num_stages):
        plgpu.barrier_arrive(shared.k_free.at[stage])
        plgpu.barrier_arrive(shared.v_free.at[stage])
    if launch.num_warpgroups > 1:
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(shared.turn.at[0]))

    def compute_item(i: Any, item: Item, blocks_before: Any) -> None:
        rows = _Rows(launch, shared, item, warpgroup, lax.rem(i, 2), blocks_before)
        plgpu.barrier_wait(shared.q_ready.at[rows.buffer])
        attend = rows.attend
        if launch.may_stand_by:
            attend = functools.partial(lax.cond, rows.has_tokens, rows.attend, rows.stand_by)
        acc, m, total = lax.cond(rows.num_blocks > 0, attend, rows.without_keys)
        total = jnp.where(total == 0, jnp.ones_like(total), total)  # without keys the result is zero
        whole = total
        if launch.has_sinks:
            whole = total + jnp.exp2(_sinks(launch, inputs, item, warpgroup) - m * launch.scale)
        acc = acc * _in_columns(1 / whole, acc)
        store = functools.partial(store_rows, launch, inputs, shared, item, warpgroup, rows.buffer)
        store(acc, m * launch.scale + jnp.log2(total))

    for_each_item(launch, inputs, program, compute_item)
    plgpu.wait_smem_to_gmem(0)
    if launch.num_warpgroups > 1:
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(shared.turn.at[0]))


def _sinks(launch: KernelLaunch, inputs: Inputs, item: Item, warpgroup: Any) -> Any:
    """Return the sinks of a warpgroup's rows in base 2, f32[64]."""
    rows = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=_LAYOUT.reduce(1))
    found = _full((WARPGROUP_ROWS,), _MASKED)
    for first, head, _ in launch.runs(warpgroup):
        if launch.has_spare_heads:  # padding has the last head's
            head = jnp.minimum(head, launch.spec.group - 1)
        found = jnp.where(rows >= first, inputs.sink(launch, item, head), found)
    return found


def _in_columns(per_row: Any, like: Any) -> Any:
    return lax.broadcast_in_dim(per_row, like.shape, (0,))


def _in_threads(combine: Callable[[Any, Any], Any], values: Any) -> Any:
    """Combine f32[64, n] to f32[64, 8] within each thread, as a tree to avoid a long dependency chain."""
    parts = [values[:, c : c + _OWN_COLUMNS] for c in range(0, values.shape[1], _OWN_COLUMNS)]
    while len(parts) > 1:
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _full(shape: tuple[int, ...], value: float) -> Any:
    """Return registers filled with `value`, for rows and columns or for rows."""
    layout = _LAYOUT if len(shape) == 2 else _LAYOUT.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@dataclass(frozen=True)
class _Rows:
    """One warpgroup's rows of one item; blocks are counted in the order of processing."""

    launch: KernelLaunch
    shared: Shared
    item: Item
    warpgroup: Any
    buffer: Any  # buffer of the queries
    blocks_before: Any  # number of blocks of earlier items

    @property
    def num_blocks(self) -> Any:
        return self.item.num_blocks(self.launch)

    def stage_of(self, block: Any) -> Any:
        return self.launch.stage_of(self.blocks_before + block)

    def first_key(self, block: Any) -> Any:
        return self.item.kv_begin + (self.num_blocks - 1 - block) * self.launch.tile_class.block_kv

    def attend(self) -> tuple[Any, Any, Any]:
        """Return weighted values f32[64, head_dim], unscaled maximum f32[64] and total weight f32[64].

        Each thread keeps its own part of the total until the end.
        """
        item, block_kv = self.item, self.launch.tile_class.block_kv
        seen_by_all = jnp.minimum(item.position + 1, item.kv_end) - item.kv_begin
        num_whole = lax.div(jnp.maximum(seen_by_all, 0), block_kv)
        acc, m = _full((WARPGROUP_ROWS, self.launch.head_dim), 0), _full((WARPGROUP_ROWS,), _NO_MAXIMUM)
        self.await_keys(0)
        scores = lax.optimization_barrier(self.scores(0))
        self.free_other_queries()
        m, _, weights, total = self.weigh(scores, m, 0, masked=True)
        plgpu.barrier_wait(self.shared.v_ready.at[self.stage_of(0)])
        self.zero_hidden_values()
        self.await_keys(1)
        num_masked = jnp.maximum(self.num_blocks - num_whole, 1)
        carry = (acc, m, total, weights.astype(self.launch.dtype))
        carry = lax.fori_loop(1, num_masked, functools.partial(self.step, masked=True), carry)
        num_seen = self.num_blocks  # blocks before those in which windows begin
        if self.launch.spec.window is not None:
            num_seen = jnp.maximum(num_seen - item.num_window_blocks(self.launch), num_masked)
        carry = lax.fori_loop(num_masked, num_seen, functools.partial(self.step, masked=False), carry)
        if self.launch.spec.window is not None:
            carry = lax.fori_loop(num_seen, self.num_blocks, functools.partial(self.step, masked=True), carry)
        acc, m, total, weights = carry
        last = self.num_blocks - 1
        self.await_values(last)
        acc = self.add_values(acc, weights, last)
        self.free_values(last)
        return acc, m, total.sum(axis=1)

    def without_keys(self) -> tuple[Any, Any, Any]:
        """Return the result of `attend` for tokens that belong to no row."""
        self.free_other_queries()
        return self.nothing()

    @property
    def has_tokens(self) -> Any:
        """Whether any of this warpgroup's rows belongs to a token."""
        return self.item.num_tokens > lax.rem(self.warpgroup * WARPGROUP_ROWS, self.launch.tile_tokens)

    def stand_by(self) -> tuple[Any, Any, Any]:
        """Replace `attend` in a warpgroup without tokens, which computes nothing.

        It waits and arrives at the same barriers as `attend` and `step`, in the same order of blocks, and
        zeroes its part of the values. Changes there require changes here.
        """
        self.free_other_queries()

        def pass_by(block: Any, _: None) -> None:
            self.await_keys(block)
            self.free_keys(block)
            self.take_turn()
            self.await_values(block - 1)
            self.give_turn()
            self.free_values(block - 1)

        self.await_keys(0)
        self.free_keys(0)
        plgpu.barrier_wait(self.shared.v_ready.at[self.stage_of(0)])
        self.zero_hidden_values()
        lax.fori_loop(1, self.num_blocks, pass_by, None)
        last = self.num_blocks - 1
        self.await_values(last)
        self.free_values(last)
        return self.nothing()

    def nothing(self) -> tuple[Any, Any, Any]:
        """Return the result of `attend` without visible keys."""
        per_row = _full((WARPGROUP_ROWS,), 0)
        return _full((WARPGROUP_ROWS, self.launch.head_dim), 0), per_row, per_row

    def step(self, block: Any, carry: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
        """Add the values of the block before, and meanwhile compute the weights of this block's keys.

        `stand_by` must wait and arrive at the same barriers.
        """
        acc, m, total, weights = carry
        weigh = functools.partial(self.weigh, m=m, block=block, masked=masked)
        if self.launch.interpret:
            acc, (m, alpha, new_weights, weight) = self.one_by_one(acc, weights, block, weigh)
        else:
            shape = (WARPGROUP_ROWS, self.launch.tile_class.block_kv)
            blank = (m, m, _full(shape, 0), _full(total.shape, 0))
            overlapped = functools.partial(self.overlapped, weights=weights, block=block, weigh=weigh)
            acc, *results = pl.run_state(overlapped)((plgpu.ACC.init(acc), *blank))
            # The old weights are an operand in registers. They must be held until the products are done, and
            # the new weights packed only after that. Otherwise the assembler serializes all products.
            acc, results, _ = lax.optimization_barrier((acc, results, weights))
            m, alpha, new_weights, weight = results
        self.free_values(block - 1)
        new_weights = new_weights.astype(self.launch.dtype)
        total = total * _in_columns(alpha, total) + weight
        return acc * _in_columns(alpha, acc), m, total, new_weights

    def overlapped(
        self, refs: tuple[Any, ...], *, weights: Any, block: Any, weigh: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        """Issue both products of a step, and compute its softmax after the first and during the second."""
        acc_ref, *result_refs = refs

        def issue(scores_ref: Any) -> Any:
            self.take_turn()
            self.multiply_keys(scores_ref, block)
            self.await_values(block - 1)
            plgpu.wgmma(acc_ref, weights, self.shared.v.at[self.stage_of(block - 1)])
            self.give_turn()
            return plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)

        shape = (WARPGROUP_ROWS, self.launch.tile_class.block_kv)
        scores = pl.run_scoped(issue, plgpu.ACC(shape, jnp.float32))
        # The compiler moves nothing across these barriers. So the softmax stays after the first wait, and
        # before the second, which is at the end of this function.
        results = lax.optimization_barrier(weigh(lax.optimization_barrier(scores)))
        # The assembler moves waits, but not across a jump, and this call contains one.
        self.await_keys(block + 1)
        for ref, result in zip(result_refs, results, strict=True):
            ref[...] = result

    def one_by_one(
        self, acc: Any, weights: Any, block: Any, weigh: Callable[[Any], tuple[Any, ...]]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Replace `overlapped` in the interpreter, which has no accumulator state."""
        self.take_turn()
        scores = self.scores(block)
        self.await_values(block - 1)
        acc = self.add_values(acc, weights, block - 1)
        self.give_turn()
        results = weigh(scores)
        self.await_keys(block + 1)
        return acc, results

    def await_keys(self, block: Any) -> None:
        ready = self.shared.k_ready.at[self.stage_of(block)]
        pl.when(block < self.num_blocks)(lambda: plgpu.barrier_wait(ready))

    def await_values(self, block: Any) -> None:
        """Wait for a block's values, except the first block's, which `attend` has waited for."""
        ready = self.shared.v_ready.at[self.stage_of(block)]
        pl.when(block > 0)(lambda: plgpu.barrier_wait(ready))

    def free_keys(self, block: Any) -> None:
        plgpu.barrier_arrive(self.shared.k_free.at[self.stage_of(block)])

    def free_values(self, block: Any) -> None:
        plgpu.barrier_arrive(self.shared.v_free.at[self.stage_of(block)])

    def take_turn(self) -> None:
        if self.launch.num_warpgroups > 1:
            plgpu.barrier_wait(self.shared.turn.at[self.warpgroup])

    def give_turn(self) -> None:
        if self.launch.num_warpgroups > 1:
            plgpu.barrier_arrive(self.shared.turn.at[1 - self.warpgroup])

    def free_other_queries(self) -> None:
        """Free the buffer of the item before: its result has left after the wait, or it was never used."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.shared.q_free.at[1 - self.buffer])

    def multiply_keys(self, scores_ref: Any, block: Any) -> None:
        keys = self.shared.k.at[self.stage_of(block)]
        for square, column in enumerate(self.launch.column_starts):
            queries = self.shared.q_tiles(self.launch).at[self.buffer, self.warpgroup, square]
            plgpu.wgmma(scores_ref, queries, keys.at[:, pl.ds(column, COLUMNS)].T)

    def scores(self, block: Any) -> Any:
        """Return the scores of a block before they are scaled, f32[64, block_kv]."""

        def multiply(scores_ref: Any) -> Any:
            self.multiply_keys(scores_ref, block)
            return scores_ref[...]

        shape = (WARPGROUP_ROWS, self.launch.tile_class.block_kv)
        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def add_values(self, acc: Any, weights: Any, block: Any) -> Any:
        values = self.shared.v.at[self.stage_of(block)]
        if self.launch.interpret:  # the interpreter takes no operand in registers
            copy = values[...].astype(jnp.float32)
            plgpu.commit_smem()
            return acc + jnp.dot(weights.astype(jnp.float32), copy)
        acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))
        return lax.optimization_barrier((acc, weights))[0]  # hold the weights, as in `step`

    def weigh(self, scores: Any, m: Any, block: Any, *, masked: bool) -> tuple[Any, Any, Any, Any]:
        """Return new maximum, factor for older sums, weights f32[64, block_kv] and their sums f32[64, 8]."""
        self.free_keys(block)
        scale = self.launch.scale
        if masked:
            scores = self.mask(scores, block)
        m_new = jnp.maximum(m, _in_threads(jnp.maximum, scores).max(axis=1))
        # The scale is positive, so it may be applied after the maximum, as one multiply-add.
        weights = jnp.exp2(scores * scale - _in_columns(m_new * scale, scores))
        return m_new, jnp.exp2((m - m_new) * scale), weights, _in_threads(jnp.add, weights)

    def mask(self, scores: Any, block: Any) -> Any:
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=_LAYOUT)
        tokens = lax.rem(iota(0) + self.warpgroup * WARPGROUP_ROWS, self.launch.tile_tokens)
        last_key = jnp.minimum(self.item.position + tokens, self.item.kv_end - 1)
        keys = iota(1) + self.first_key(block)
        visible = keys <= last_key
        if (window := self.launch.spec.window) is not None:
            visible &= keys > self.item.position - window + tokens
        return jnp.where(visible, scores, _MASKED)

    def zero_hidden_values(self) -> None:
        """Zero the first block's values past the range, and those before all windows.

        If the range ends with a page, there is nothing to do: that page was fetched again for the rest.
        """
        squares = [
            (key, column)
            for key in range(0, self.launch.tile_class.block_kv, COLUMNS)
            for column in self.launch.column_starts
        ]

        @pl.when(lax.rem(self.item.kv_end, self.launch.spec.page_size) != 0)
        def zero() -> None:
            for n, (key, column) in enumerate(squares):
                pl.when(self.warpgroup == n % self.launch.num_warpgroups)(
                    functools.partial(self.zero_square, key, column)
                )
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.shared.values_clean)
            plgpu.barrier_wait(self.shared.values_clean)

    def zero_square(self, key: int, column: int) -> None:
        square = self.shared.v.at[self.stage_of(0), pl.ds(key, COLUMNS), pl.ds(column, COLUMNS)]
        values = plgpu.layout_cast(square[...], _LAYOUT)
        keys = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_LAYOUT)
        is_visible = keys + (self.first_key(0) + key) < self.item.kv_end
        if (window := self.launch.spec.window) is not None:
            # The page that replaces those before the window may be the one with unused slots.
            is_visible &= keys + (self.first_key(0) + key) > self.item.position - window
        square[...] = jnp.where(is_visible, values, jnp.zeros_like(values))
