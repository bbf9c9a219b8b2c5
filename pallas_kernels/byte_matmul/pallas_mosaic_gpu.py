"""The product through Pallas' Mosaic GPU back end, for NVIDIA Hopper: bfloat16 times codes of 8 bits.

Owns: the kernel. Does not know: which tile is best, or what is multiplied.

With few rows a product is bound by reading its weights once. Operands are swapped: the codes of 64 columns of
the result are the rows of a `wgmma`, whose left operand comes from registers. So a warpgroup converts codes
on their way from shared memory, no row of x is padded beyond a multiple of 8, and weights lie as checkpoints
have them, [columns, depth]. The scale of a column follows its sum, in float32.

A program computes all rows of some columns. One warpgroup fetches blocks of x and codes through the tensor
memory accelerator (TMA) into a ring in shared memory; two multiply. In narrow programs, of 64 columns, each
of the two sums every second block. In gated ones, one has the gate and one the other factor. The first adds
or multiplies at the end. No sum is divided among programs, and its order is the same for any number of rows.
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

from pallas_kernels.byte_matmul.tiles import (
    BLOCK_K,
    NUM_WARPGROUPS,
    WARPGROUP_COLUMNS,
    ByteTile,
    padded_rows,
)
from pallas_kernels.decode_matmul.pallas_mosaic_gpu import GATE_FUNCTIONS, GATE_NAMES

_Layout = plgpu.Layout
# (Upstream's annotations make these classes abstract.)
_X_TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
_CODE_TILES = (plgpu.TilingTransform((8, BLOCK_K)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
_COLUMNS = _Layout.WGMMA.reduce(1)  # layout of a vector over the rows of the sums: columns of the result
# Registers of a thread that multiplies, and of one that fetches.
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 232, 40


class Product(NamedTuple):
    """Static parameters of a compiled kernel."""

    num_rows: int
    depth: int
    width: int
    dtype: Any  # of the codes
    gate: str | None
    has_bias: bool
    relu: bool
    tile: ByteTile
    interpret: bool

    @property
    def gated(self) -> bool:
        """Whether the product is of two parts of the codes."""
        return self.gate is not None

    @property
    def rows(self) -> int:
        """Rows of x in shared memory, which are columns of the sums."""
        return padded_rows(self.num_rows)

    @property
    def num_parts(self) -> int:
        """Ranges of columns that a program reads: two (gate and up) or one."""
        return 1 + self.gated

    @property
    def num_blocks(self) -> int:
        """Blocks along the dimension that is summed."""
        return self.depth // BLOCK_K

    @property
    def alternates(self) -> bool:
        """Whether each warpgroup has every second block."""
        return self.tile.alternates(gated=self.gated)

    @property
    def num_sums(self) -> int:
        """Sums of one warpgroup, [64, rows] each."""
        return 1 if self.tile.is_shared else self.num_parts

    @property
    def num_results(self) -> int:
        """Warpgroups that store a result."""
        return self.tile.columns // WARPGROUP_COLUMNS


class _Refs(NamedTuple):
    """References to global and shared memory, and the barriers for each stage of the ring."""

    x: Any  # bf16[num_rows, depth]
    codes: Any  # [num_parts * width, depth]
    scale: Any  # f32[num_parts * width]
    bias: Any  # bf16[width], or None
    out: Any  # bf16[num_rows, width]
    x_ring: Any  # [num_stages, rows, BLOCK_K]
    code_ring: Any  # [num_stages, num_parts, columns, BLOCK_K]
    scales: Any  # [num_parts, columns]
    result: Any  # [num_results, rows, 64]
    ready: Any
    free: Any
    scales_ready: Any
    other: Any = None  # f32[64, rows]: the sum of the second warpgroup, if columns are shared
    other_ready: Any = None
    bias_block: Any = None  # [columns]
    bias_ready: Any = None


def mosaic_byte_matmul(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    *,
    gate: str | None,
    relu: bool,
    tile: ByteTile,
    interpret: bool,
) -> jax.Array:
    """See `api.byte_matmul`; arguments are already checked."""
    num_rows, depth = x.shape
    width = codes.shape[0] // (1 if gate is None else 2)
    has_bias = bias is not None
    product = Product(num_rows, depth, width, codes.dtype, gate, has_bias, relu, tile, interpret)
    result: jax.Array = _kernel_of(product)(x, codes, scale, *(() if bias is None else (bias,)))
    return result


@functools.cache
def _kernel_of(product: Product) -> Callable[..., jax.Array]:
    """Return the jitted kernel, cached: a model calls it in every layer, but it is lowered only once."""
    tile, rows = product.tile, product.rows
    optional: dict[str, Any] = {}
    if tile.is_shared:
        optional["other"] = plgpu.SMEM((WARPGROUP_COLUMNS, rows), jnp.float32)
        optional["other_ready"] = plgpu.Barrier(num_arrivals=1)
    if product.has_bias:
        optional["bias_block"] = plgpu.SMEM((tile.columns,), jnp.bfloat16)
        optional["bias_ready"] = plgpu.Barrier(num_arrivals=1)
    readers = 1 if product.alternates else NUM_WARPGROUPS
    block = product.num_parts, tile.columns, BLOCK_K
    kernel = plgpu.kernel(
        functools.partial(_kernel, product=product),
        out_type=jax.ShapeDtypeStruct((product.num_rows, product.width), jnp.bfloat16),
        scratch_types={
            "x_ring": plgpu.SMEM((tile.num_stages, rows, BLOCK_K), jnp.bfloat16, transforms=_X_TILES),
            "code_ring": plgpu.SMEM((tile.num_stages, *block), product.dtype, transforms=_CODE_TILES),
            "scales": plgpu.SMEM((product.num_parts, tile.columns), jnp.float32),
            "result": plgpu.SMEM(
                (product.num_results, rows, WARPGROUP_COLUMNS), jnp.bfloat16, transforms=_X_TILES
            ),
            "ready": plgpu.Barrier(num_arrivals=1 + product.num_parts, num_barriers=tile.num_stages),
            "free": plgpu.Barrier(num_arrivals=readers, num_barriers=tile.num_stages),
            "scales_ready": plgpu.Barrier(num_arrivals=product.num_parts),
            **optional,
        },
        grid=(product.width // tile.columns,),
        grid_names=("columns",),
        num_threads=NUM_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if product.interpret else None,
        kernel_name=f"byte_matmul_{GATE_NAMES[product.gate]}{'relu_' * product.relu}{rows}",
    )
    return jax.jit(kernel)


def _kernel(*args: Any, product: Product, **scratch: Any) -> None:
    """Run one program: its last warpgroup fetches, the others multiply."""
    x, codes, scale, *bias, out = args
    refs = _Refs(x, codes, scale, bias[0] if bias else None, out, **scratch)
    warpgroup = lax.axis_index("warpgroup")
    column = lax.axis_index("columns") * product.tile.columns

    @pl.when(warpgroup == NUM_WARPGROUPS)
    def fetch() -> None:
        if not product.interpret:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
        _fetch(product, refs, column)

    @pl.when(warpgroup < NUM_WARPGROUPS)
    def multiply() -> None:
        if not product.interpret:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        _multiply(product, refs, column, warpgroup)


def _fetch(product: Product, refs: _Refs, column: Any) -> None:
    """Copy scales, then the blocks of x and of the program's codes as stages become free."""
    tile, num_blocks = product.tile, product.num_blocks
    starts = [part * product.width + column for part in range(product.num_parts)]
    for part, start in enumerate(starts):
        plgpu.copy_gmem_to_smem(
            refs.scale.at[pl.ds(start, tile.columns)], refs.scales.at[part], refs.scales_ready
        )
    if product.has_bias:
        bias = refs.bias.at[pl.ds(column, tile.columns)]
        plgpu.copy_gmem_to_smem(bias, refs.bias_block, refs.bias_ready)

    def fetch_block(block: Any, _: None) -> None:
        stage = lax.rem(block, tile.num_stages)
        pl.when(block >= tile.num_stages)(lambda: plgpu.barrier_wait(refs.free.at[stage]))
        along = pl.ds(block * BLOCK_K, BLOCK_K)
        ready = refs.ready.at[stage]
        for part, start in enumerate(starts):
            rows = pl.ds(start, tile.columns)
            plgpu.copy_gmem_to_smem(refs.codes.at[rows, along], refs.code_ring.at[stage, part], ready)
        rows = pl.ds(0, product.rows)
        plgpu.copy_gmem_to_smem(refs.x.at[rows, along], refs.x_ring.at[stage], ready)

    def await_last(block: Any, _: None) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(block, tile.num_stages)])

    lax.fori_loop(0, num_blocks, fetch_block, None)
    # Wait for every arrival, also the last ones.
    lax.fori_loop(max(num_blocks - tile.num_stages, 0), num_blocks, await_last, None)


def _multiply(product: Product, refs: _Refs, column: Any, warpgroup: Any) -> None:
    """Sum a warpgroup's columns, and store them."""
    sums = _interpreted_sums if product.interpret else _sums
    sums(product, refs, warpgroup, functools.partial(_finish, product, refs, column, warpgroup))


def _blocks(product: Product, warpgroup: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return how many blocks a warpgroup has, and the function from a count to the block."""
    if not product.alternates:
        return product.num_blocks, lambda i: i
    first = warpgroup
    return lax.div(product.num_blocks + 1 - first, 2), lambda i: 2 * i + first


def _parts(product: Product, warpgroup: Any) -> list[tuple[Any, Any]]:
    """Return the part and the first column, within the program's, of each sum of a warpgroup."""
    if not product.tile.is_shared:
        return [(part, warpgroup * WARPGROUP_COLUMNS) for part in range(product.num_parts)]
    return [(warpgroup if product.gated else 0, 0)]


def _sums(product: Product, refs: _Refs, warpgroup: Any, finish: Callable[..., None]) -> None:
    """Call `finish` with the sums of a warpgroup, f32[64, rows] each."""
    count, block_of = _blocks(product, warpgroup)
    parts, num_stages = _parts(product, warpgroup), product.tile.num_stages

    def with_sums(*sums: Any) -> None:
        def add_blocks(i: Any, _: None, *, num_blocks: int) -> None:
            for which in range(num_blocks):
                number = i * num_blocks + which
                stage = lax.rem(block_of(number), num_stages)
                plgpu.barrier_wait(refs.ready.at[stage])
                for (part, first), one in zip(parts, sums, strict=True):
                    codes = plgpu.load(
                        refs.code_ring.at[stage, part, pl.ds(first, WARPGROUP_COLUMNS)],
                        layout=_Layout.WGMMA_UPCAST_2X,
                    )
                    operand = _as_operand(codes)
                    plgpu.wgmma_wait(0)  # the product before, which ran meanwhile
                    if one is sums[0]:
                        pl.when(number > 0)(functools.partial(free, number - 1))
                    plgpu.wgmma(one, operand, refs.x_ring.at[stage].T)

        def free(number: Any) -> None:
            plgpu.barrier_arrive(refs.free.at[lax.rem(block_of(number), num_stages)])

        # Operands of two products in flight must be different registers, so a loop has two products.
        at_once = 3 - len(sums)
        rounds = lax.div(count, at_once)
        lax.fori_loop(0, rounds, functools.partial(add_blocks, num_blocks=at_once), None)
        if at_once > 1:
            lax.fori_loop(rounds * at_once, count, functools.partial(add_blocks, num_blocks=1), None)
        totals = [one[...] for one in sums]  # waits for the last product
        free(count - 1)
        finish(*totals)

    pl.run_scoped(with_sums, *[plgpu.ACC((WARPGROUP_COLUMNS, product.rows), jnp.float32)] * product.num_sums)


def _as_operand(codes: Any) -> Any:
    """Return codes as bfloat16 in the layout of a product's left operand."""
    if codes.dtype == jnp.int8:
        return plgpu.layout_cast(codes.astype(jnp.bfloat16), _Layout.WGMMA)
    # No instruction makes bfloat16 of e4m3; float16 holds all of its numbers.
    halves = plgpu.layout_cast(codes.astype(jnp.float16), _Layout.WGMMA)
    return halves.astype(jnp.float32).astype(jnp.bfloat16)


def _interpreted_sums(product: Product, refs: _Refs, warpgroup: Any, finish: Callable[..., None]) -> None:
    """As `_sums`, for the interpreter, which takes no operand from registers."""
    count, block_of = _blocks(product, warpgroup)
    parts = _parts(product, warpgroup)

    def add_block(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        stage = lax.rem(block_of(i), product.tile.num_stages)
        plgpu.barrier_wait(refs.ready.at[stage])
        x = refs.x_ring[stage].T.astype(jnp.float32)
        added = []
        for (part, first), one in zip(parts, sums, strict=True):
            codes = refs.code_ring[stage, part, pl.ds(first, WARPGROUP_COLUMNS)]
            added.append(one + jnp.dot(codes.astype(jnp.float32), x))
        # The race detector requires a fence between plain reads and a later copy to the same place. On
        # hardware, what is in registers has been read, so no fence is needed.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.free.at[stage])
        return tuple(added)

    zeros = jnp.zeros((WARPGROUP_COLUMNS, product.rows), jnp.float32)
    finish(*lax.fori_loop(0, count, add_block, (zeros,) * product.num_sums))


def _finish(product: Product, refs: _Refs, column: Any, warpgroup: Any, *sums: Any) -> None:
    """Combine the sums of both warpgroups if they share columns; scale them and store the result."""
    plgpu.barrier_wait(refs.scales_ready)
    if not product.tile.is_shared:
        first = warpgroup * WARPGROUP_COLUMNS
        scaled = [one * _scale(product, refs, part, first, one) for part, one in enumerate(sums)]
        _store(product, refs, column, warpgroup, first, scaled)
        return
    (total,) = sums

    @pl.when(warpgroup == 1)
    def hand_over() -> None:
        refs.other[...] = total
        plgpu.barrier_arrive(refs.other_ready)

    @pl.when(warpgroup == 0)
    def combine() -> None:
        plgpu.barrier_wait(refs.other_ready)
        if product.interpret:
            other = refs.other[...]
        else:
            other = plgpu.load(refs.other, layout=_Layout.WGMMA, optimized=False)
        if product.gated:
            scaled = [one * _scale(product, refs, part, 0, one) for part, one in enumerate((total, other))]
        else:
            scaled = [(total + other) * _scale(product, refs, 0, 0, total)]
        _store(product, refs, column, 0, 0, scaled)


def _scale(product: Product, refs: _Refs, part: int, first: Any, like: Any) -> Any:
    """Return the scales of 64 columns, for every row."""
    block = refs.scales.at[part, pl.ds(first, WARPGROUP_COLUMNS)]
    return lax.broadcast_in_dim(_column_vector(product, block), like.shape, (0,))


def _column_vector(product: Product, block: Any) -> Any:
    if product.interpret:
        return block[...].astype(jnp.float32)
    # All rows of a warpgroup's sums have the same columns; no load of whole vectors has this layout.
    return plgpu.load(block, layout=_COLUMNS, optimized=False).astype(jnp.float32)


def _store(product: Product, refs: _Refs, column: Any, place: Any, first: Any, scaled: list[Any]) -> None:
    """Finish 64 columns of the result, f32[64, rows], and copy them to the rows of the result."""
    total = scaled[0] if product.gate is None else GATE_FUNCTIONS[product.gate](scaled[0]) * scaled[1]
    if product.has_bias:
        plgpu.barrier_wait(refs.bias_ready)
        bias = _column_vector(product, refs.bias_block.at[pl.ds(first, WARPGROUP_COLUMNS)])
        total += lax.broadcast_in_dim(bias, total.shape, (0,))
    if product.relu:
        total = jnp.maximum(total, 0.0)
    rounded = total.astype(jnp.bfloat16)
    if product.interpret:
        refs.result[place] = rounded.T
    else:
        refs.result.at[place].T[...] = plgpu.layout_cast(rounded, _Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    columns = pl.ds(column + first, WARPGROUP_COLUMNS)
    plgpu.copy_smem_to_gmem(refs.result.at[place], refs.out.at[pl.ds(0, product.rows), columns])
    plgpu.wait_smem_to_gmem(0)
