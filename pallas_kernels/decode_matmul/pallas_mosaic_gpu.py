"""The product through Pallas' Mosaic GPU back end, for NVIDIA Hopper and bfloat16.

Owns: the kernel. Does not know: which tile is best, or what is multiplied. Called by: `api`.

With few rows a product is bound by reading its weights once. A program computes all rows of some columns. One
warpgroup fetches blocks of x and w through the tensor memory accelerator (TMA) into a ring in shared memory;
the others multiply, 64 rows each. No sum is split among programs. So nothing is added afterwards, and the
order of a sum is the same for any number of rows.

Only existing rows of x are copied, since the TMA takes longer to fill rows with zeros than to copy them. Up
to seven rows after the last are zeros; later rows are whatever is in shared memory. Neither affects the
result: no row of a product reads another row, and these rows are not stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_matmul.tiles import PIECE_ROWS, SWIZZLED, MatmulTile, tile_rows

_WARPGROUP_ROWS = 64
# (Upstream's annotations make these classes abstract.)
_TILES = (plgpu.TilingTransform((8, SWIZZLED)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # layout of a vector over the columns of the sums
# Registers of a thread that multiplies, and of one that fetches, if two warpgroups multiply.
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 232, 40
GATE_NAMES = {None: "", "silu": "gated_", "gelu_tanh": "gelu_gated_"}  # parts of a kernel's name, by its gate
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


class Product(NamedTuple):
    """Static parameters of a compiled kernel."""

    num_rows: int
    depth: int
    width: int
    gate: str | None
    has_bias: bool
    relu: bool
    tile: MatmulTile
    interpret: bool

    @property
    def gated(self) -> bool:
        """Whether the product is of two parts of w."""
        return self.gate is not None

    @property
    def tile_rows(self) -> int:
        """Rows of x in shared memory; see `tiles.tile_rows`."""
        return tile_rows(self.num_rows)

    @property
    def fetched_rows(self) -> int:
        """Rows of x that are copied."""
        return -(-self.num_rows // PIECE_ROWS) * PIECE_ROWS

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups that multiply, one for each 64 rows."""
        return self.tile_rows // _WARPGROUP_ROWS

    @property
    def num_parts(self) -> int:
        """Ranges of w's columns that a program reads: two (gate and up) or one."""
        return 1 + self.gated

    @property
    def num_blocks(self) -> int:
        """Blocks along the dimension that is summed."""
        return self.depth // self.tile.block_k

    @property
    def w_block(self) -> tuple[int, int]:
        """Shape of a block of one part of w."""
        return self.tile.block_k, self.tile.columns

    @property
    def stored_rows(self) -> int:
        """Rows that a warpgroup stores. The end of the result cuts off surplus rows of a second warpgroup."""
        return min(_WARPGROUP_ROWS, self.fetched_rows)


class _Refs(NamedTuple):
    """References to global and shared memory, and the barriers for each stage of the ring."""

    x: Any  # [num_rows, depth]
    w: Any  # [depth, num_parts * width]
    bias: Any  # [width], or None
    out: Any  # [num_rows, width]
    x_ring: Any  # [num_stages, tile_rows, block_k]
    w_ring: Any  # [num_stages, num_parts, *w_block]
    result: Any  # [num_warpgroups, 64, columns]
    ready: Any
    free: Any
    bias_block: Any = None  # [columns]
    bias_ready: Any = None


def mosaic_decode_matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    gate: str | None,
    relu: bool,
    tile: MatmulTile,
    interpret: bool,
) -> jax.Array:
    """See `api.decode_matmul`; arguments are already checked."""
    num_rows, depth = x.shape
    width = w.shape[1] // (1 if gate is None else 2)
    product = Product(num_rows, depth, width, gate, bias is not None, relu, tile, interpret)
    result: jax.Array = _kernel_of(product)(x, w, *(() if bias is None else (bias,)))
    return result


@functools.cache
def _kernel_of(product: Product) -> Callable[..., jax.Array]:
    """Return the jitted kernel, cached: a model calls it in every layer, but it is lowered only once."""
    tile, num_warpgroups = product.tile, product.num_warpgroups
    ring = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_TILES)
    of_bias: dict[str, Any] = {
        "bias_block": plgpu.SMEM((tile.columns,), jnp.bfloat16),
        "bias_ready": plgpu.Barrier(num_arrivals=1),
    }
    kernel = plgpu.kernel(
        functools.partial(_kernel, product=product),
        out_type=jax.ShapeDtypeStruct((product.num_rows, product.width), jnp.bfloat16),
        scratch_types={
            "x_ring": ring((tile.num_stages, product.tile_rows, tile.block_k)),
            "w_ring": ring((tile.num_stages, product.num_parts, *product.w_block)),
            "result": ring((num_warpgroups, _WARPGROUP_ROWS, tile.columns)),
            "ready": plgpu.Barrier(num_arrivals=1 + product.num_parts, num_barriers=tile.num_stages),
            "free": plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=tile.num_stages),
            **(of_bias if product.has_bias else {}),
        },
        grid=(product.width // tile.columns,),
        grid_names=("columns",),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if product.interpret else None,
        kernel_name=f"decode_matmul_{GATE_NAMES[product.gate]}{'relu_' * product.relu}{product.tile_rows}",
    )
    return jax.jit(kernel)


def _kernel(*args: Any, product: Product, **scratch: Any) -> None:
    """Run one program: its last warpgroup fetches, the others multiply."""
    x, w, *bias, out = args
    refs = _Refs(x, w, bias[0] if bias else None, out, **scratch)
    warpgroup = lax.axis_index("warpgroup")
    column = lax.axis_index("columns") * product.tile.columns
    # With one warpgroup of each kind every thread already has the most registers that a thread can have.
    moves_registers = product.num_warpgroups > 1 and not product.interpret

    @pl.when(warpgroup == product.num_warpgroups)
    def fetch() -> None:
        if moves_registers:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
        _fetch(product, refs, column)

    @pl.when(warpgroup < product.num_warpgroups)
    def multiply() -> None:
        if moves_registers:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        _multiply(product, refs, column, warpgroup)


def _fetch(product: Product, refs: _Refs, column: Any) -> None:
    """Copy the blocks of x and of the program's columns as stages become free."""
    tile, num_blocks = product.tile, product.num_blocks
    rows = pl.ds(0, product.fetched_rows)
    if product.has_bias:
        bias = refs.bias.at[pl.ds(column, tile.columns)]
        plgpu.copy_gmem_to_smem(bias, refs.bias_block, refs.bias_ready)

    def fetch_block(block: Any, _: None) -> None:
        stage = lax.rem(block, tile.num_stages)
        pl.when(block >= tile.num_stages)(lambda: plgpu.barrier_wait(refs.free.at[stage]))
        along = pl.ds(block * tile.block_k, tile.block_k)
        ready = refs.ready.at[stage]
        plgpu.copy_gmem_to_smem(refs.x.at[rows, along], refs.x_ring.at[stage, rows], ready)
        for part in range(product.num_parts):
            columns = pl.ds(part * product.width + column, tile.columns)
            plgpu.copy_gmem_to_smem(refs.w.at[along, columns], refs.w_ring.at[stage, part], ready)

    def await_last(block: Any, _: None) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(block, tile.num_stages)])

    lax.fori_loop(0, num_blocks, fetch_block, None)
    # Wait for every arrival, also the last ones.
    lax.fori_loop(max(num_blocks - tile.num_stages, 0), num_blocks, await_last, None)


def _multiply(product: Product, refs: _Refs, column: Any, warpgroup: Any) -> None:
    """Sum a warpgroup's 64 rows and store them."""
    num_stages, num_blocks = product.tile.num_stages, product.num_blocks
    rows = pl.ds(warpgroup * _WARPGROUP_ROWS, _WARPGROUP_ROWS)

    def with_sums(*sums: Any) -> None:
        def add_block(block: Any, _: None) -> None:
            stage = lax.rem(block, num_stages)
            plgpu.barrier_wait(refs.ready.at[stage])
            for part, part_sums in enumerate(sums):
                plgpu.wgmma(part_sums, refs.x_ring.at[stage, rows], refs.w_ring.at[stage, part])
            plgpu.wgmma_wait(len(sums))

            @pl.when(block > 0)
            def free_the_one_before() -> None:
                plgpu.barrier_arrive(refs.free.at[lax.rem(block - 1, num_stages)])

        lax.fori_loop(0, num_blocks, add_block, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs.free.at[(num_blocks - 1) % num_stages])
        y = [part_sums[...] for part_sums in sums]
        total = y[0] if product.gate is None else GATE_FUNCTIONS[product.gate](y[0]) * y[1]
        if product.has_bias:
            plgpu.barrier_wait(refs.bias_ready)
            # All rows of a warpgroup have the same columns; no load of whole vectors has this layout.
            bias = plgpu.load(refs.bias_block, layout=_COLUMNS, optimized=False)
            total += lax.broadcast_in_dim(bias.astype(jnp.float32), total.shape, (1,))
        if product.relu:
            total = jnp.maximum(total, 0.0)
        refs.result[warpgroup] = total.astype(jnp.bfloat16)
        plgpu.commit_smem()
        stored = pl.ds(0, product.stored_rows)
        out_rows = pl.ds(warpgroup * _WARPGROUP_ROWS, product.stored_rows)
        columns = pl.ds(column, product.tile.columns)
        plgpu.copy_smem_to_gmem(refs.result.at[warpgroup, stored], refs.out.at[out_rows, columns])
        plgpu.wait_smem_to_gmem(0)

    sums = [plgpu.ACC((_WARPGROUP_ROWS, product.tile.columns), jnp.float32)] * product.num_parts
    pl.run_scoped(with_sums, *sums)


def _silu(x: Any) -> Any:
    return x / (1 + jnp.exp(-x))


def _gelu_tanh(x: Any) -> Any:
    """Return GELU in its tanh form, by an exponential: (1 + tanh(z)) / 2 is the logistic function of 2 z."""
    return x / (1 + jnp.exp(-2 * _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))


GATE_FUNCTIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}
