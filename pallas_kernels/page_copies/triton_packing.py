"""Packing and unpacking of pages through Pallas' Triton back end, for NVIDIA GPUs from Ampere on.

Owns: the two kernels and their launches. Does not know: what the format is for. Called by: `packed_copies`.
Upstream has deprecated this back end; see `pallas_triton`. Launches are as in that file, except that a
program moves one tile: many small programs hide each other's latency.

A tile is one block [halves, rows, groups, numbers] from the load to the store. Numbers whose codes share a
byte are in one thread, and so are the numbers of a group. A group has as many packed bytes as numbers, so the
compiler gives both to the same threads. Threads exchange only values that rows, columns or the tile share.
Half of all tiles have no escape, and one in thirty has more than two. So escapes are found one by one, in
order of their position.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.page_copies.packing import (
    ESCAPE,
    MAX_BELOW,
    PackedTile,
    as_bits,
    as_numbers,
    bits_of,
    codes_of,
    exponents,
    exponents_of,
    signed_mantissas,
    weights_of,
)
from pallas_kernels.page_copies.pallas_triton import in_launches, launches, like, write_in_place

_MAX_WARPS = 16
_GROUP = 8  # numbers that a thread loads at once, 16 bytes
_NOWHERE = np.int32(2**31 - 1)


class Launches(NamedTuple):
    """Division of the work into programs and launches; all values give the same bits.

    Attributes:
      numbers_per_warp: numbers of a tile per warp. 1,024 are 32 per thread, for each of the few blocks of 32
        bits that are live at once.
      max_chunks: most chunks of one launch.
    """

    numbers_per_warp: int = 1024
    max_chunks: int = 16


_DEFAULT = Launches()


def triton_pack(
    pools: Sequence[jax.Array], pages: jax.Array, *, interpret: bool, cut: Launches = _DEFAULT
) -> tuple[list[jax.Array], jax.Array]:
    """See `packed_copies.gather_packed`; arguments are already checked."""
    chunks: list[jax.Array] = []
    num_unplaced: list[jax.Array] = []
    for first, num_chunks in launches(pages.shape[0], cut.max_chunks):
        *some, unplaced = _pack(
            list(pools), pages, first, num_chunks=num_chunks, interpret=interpret, cut=cut
        )
        chunks += some
        num_unplaced.append(unplaced)
    return chunks, jnp.concatenate(num_unplaced).max(axis=(1, 2))


def triton_unpack(
    pools: Sequence[jax.Array],
    chunks: Sequence[jax.Array],
    pages: jax.Array,
    *,
    interpret: bool,
    cut: Launches = _DEFAULT,
) -> list[jax.Array]:
    """See `packed_copies.scatter_packed`; arguments are already checked."""
    scatter = functools.partial(_unpack, interpret=interpret, cut=cut)
    return in_launches(scatter, pools, chunks, pages, cut.max_chunks)


@functools.partial(
    jax.jit, static_argnames=("num_chunks", "interpret", "cut")
)  # lowered once for all launches
def _pack(
    pools: list[jax.Array],
    pages: jax.Array,
    first: jax.Array,
    *,
    num_chunks: int,
    interpret: bool,
    cut: Launches,
) -> list[jax.Array]:
    """Run one launch; return its chunks, then i32[num_chunks, num_layers, head rows] of unplaced escapes."""
    num_heads, tile = pools[0].shape[2], _tile(pools[0])
    shape = (len(pools), tile.num_rows, num_heads, tile.head_dim)
    packed: list[jax.Array] = pl.pallas_call(
        functools.partial(_pack_kernel, num_pools=len(pools), tile=tile),
        out_shape=[
            *[like(pools[0], shape, jnp.uint8)] * num_chunks,
            like(pools[0], (num_chunks, len(pools), num_heads), jnp.int32),
        ],
        grid=(num_heads, len(pools), num_chunks),
        compiler_params=plgpu.CompilerParams(num_warps=_num_warps(tile, cut), num_stages=1),
        interpret=interpret,
        name=f"pack_pages_{num_chunks}",
    )(pages, first, *pools)
    return packed


@functools.partial(jax.jit, static_argnames=("interpret", "cut"))
def _unpack(
    pools: list[jax.Array],
    chunks: list[jax.Array],
    pages: jax.Array,
    first: jax.Array,
    *,
    interpret: bool,
    cut: Launches,
) -> list[jax.Array]:
    """Run one launch that unpacks chunks into pages, and return the updated pools."""
    tile = _tile(pools[0])
    kernel = functools.partial(_unpack_kernel, num_chunks=len(chunks), tile=tile)
    grid = (pools[0].shape[2], len(pools), len(chunks))
    num_warps = _num_warps(tile, cut)
    write = write_in_place(
        kernel, "unpack_pages", pools, len(chunks), num_warps, grid=grid, interpret=interpret
    )
    return list(write(pages, first, *chunks, *pools))  # as `pools`: a compiled caller tells lists from tuples


def _tile(pool: jax.Array) -> PackedTile:
    return PackedTile(pool.shape[1], pool.shape[3])


def _num_warps(tile: PackedTile, cut: Launches) -> int:
    return min(max(tile.page_size * tile.head_dim // cut.numbers_per_warp, 1), _MAX_WARPS)


class _Block(NamedTuple):
    """Positions of the numbers of a tile, as [halves, rows, groups, numbers].

    Attributes:
      rows: i32 row of each number.
      columns: i32 column of each number.
      half_rows: i32[rows, groups, numbers], `rows` of the first half.
      half_columns: i32[rows, groups, numbers], `columns` of the first half.
    """

    rows: Any
    columns: Any
    half_rows: Any
    half_columns: Any


def _block(tile: PackedTile) -> _Block:
    half, group = tile.page_size // 2, min(_GROUP, tile.head_dim)
    shape = (2, half, tile.head_dim // group, group)
    iotas = [jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4)]
    half_iotas = [jax.lax.broadcasted_iota(jnp.int32, shape[1:], axis) for axis in range(3)]
    return _Block(
        rows=iotas[0] * np.int32(half) + iotas[1],
        columns=iotas[2] * np.int32(group) + iotas[3],
        half_rows=half_iotas[0],
        half_columns=half_iotas[1] * np.int32(group) + half_iotas[2],
    )


def _pack_kernel(pages_ref: Any, first_ref: Any, *refs: Any, num_pools: int, tile: PackedTile) -> None:
    """Pack one tile; `refs` are the pools, the chunks, and the counts of escapes without a place."""
    pool_refs, chunk_refs, lost_ref = refs[:num_pools], refs[num_pools:-1], refs[-1]
    head, layer, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    page = pages_ref[first_ref[0] + chunk]
    block = _block(tile)

    def load(pool_ref: Any) -> Any:
        return plgpu.load(pool_ref.at[page, block.rows, head, block.columns])

    bits = as_bits(_switch(layer, [functools.partial(load, ref) for ref in pool_refs]))
    exponent = exponents(bits)
    highest = exponent.max(axis=0).max(axis=0)
    column = jnp.minimum(highest.max(axis=1).max(axis=0) - highest, MAX_BELOW)
    weights = weights_of(exponent, column)
    row = jnp.maximum(weights.max(axis=3).max(axis=2), np.int32(0))
    codes = codes_of(row[:, :, None, None] - weights)
    mantissas = signed_mantissas(bits).astype(jnp.uint8)
    nibbles = _joined(codes).astype(jnp.uint8)
    half_row = tile.head_dim // 2
    column_bytes = _joined(column.reshape(2, half_row)).astype(jnp.uint8)
    places = _list_places(tile)
    escaped, num_escapes = _escaped(codes, exponent, block, tile)
    lost_ref[chunk, layer, head] = jnp.maximum(num_escapes - np.int32(tile.num_places), np.int32(0))
    for i, chunk_ref in enumerate(chunk_refs):

        @pl.when(chunk == i)
        def store(chunk_ref: Any = chunk_ref) -> None:
            plgpu.store(chunk_ref.at[layer, block.rows, head, block.columns], mantissas)
            code_rows = block.half_rows + np.int32(tile.page_size)
            plgpu.store(chunk_ref.at[layer, code_rows, head, block.half_columns], nibbles)
            tokens = jnp.arange(tile.page_size, dtype=jnp.int32).reshape(row.shape)
            plgpu.store(_tail(chunk_ref, layer, head, tokens, tile), row.astype(jnp.uint8))
            pairs = jnp.arange(half_row, dtype=jnp.int32) + np.int32(tile.page_size)
            plgpu.store(_tail(chunk_ref, layer, head, pairs, tile), column_bytes)
            list_ref = _tail(chunk_ref, layer, head, places + np.int32(tile.first_place), tile)
            plgpu.store(list_ref, escaped.astype(jnp.uint8), mask=places < np.int32(tile.num_places))


def _escaped(codes: Any, exponent: Any, block: _Block, tile: PackedTile) -> tuple[Any, Any]:
    """Return the list of escaped exponents, and the number of escapes."""
    places = _list_places(tile)
    any_escape = _has_escapes(codes)
    num_escapes = jax.lax.cond(
        any_escape,
        lambda: _over_all(jnp.sum, (codes == ESCAPE).astype(jnp.int32)),
        lambda: any_escape.astype(jnp.int32),
    )

    def place(number: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        first, escaped = carry
        keys = jnp.where(codes == ESCAPE, (_number(block, tile) << np.int32(8)) | exponent, _NOWHERE)
        key = _least(keys, first)
        return key + np.int32(1), jnp.where(places == number, key & np.int32(0xFF), escaped)

    start = (np.int32(0), jnp.zeros(places.shape, jnp.int32))
    num_placed = jnp.minimum(num_escapes, np.int32(tile.num_places))
    return jax.lax.fori_loop(np.int32(0), num_placed, place, start)[1], num_escapes


def _unpack_kernel(pages_ref: Any, first_ref: Any, *refs: Any, num_chunks: int, tile: PackedTile) -> None:
    """Unpack one tile; `refs` are the chunks, the aliased pools (unused), then the pools."""
    chunk_refs, pool_refs = refs[:num_chunks], refs[num_chunks + (len(refs) - num_chunks) // 2 :]
    head, layer, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    page, num_pages = pages_ref[first_ref[0] + chunk], pool_refs[0].shape[0]
    block = _block(tile)
    load = functools.partial(_load_packed, layer=layer, head=head, block=block, tile=tile)
    packed = _switch(chunk, [functools.partial(load, ref) for ref in chunk_refs])
    numbers = _unpacked([part.astype(jnp.int32) for part in packed], block, tile)
    for i, pool_ref in enumerate(pool_refs):

        @pl.when((layer == i) & (page > 0) & (page < num_pages))
        def store(pool_ref: Any = pool_ref) -> None:
            plgpu.store(pool_ref.at[page, block.rows, head, block.columns], numbers)


def _load_packed(chunk_ref: Any, layer: Any, head: Any, block: _Block, tile: PackedTile) -> list[Any]:
    """Load the bytes of one tile: mantissas, codes, rows, columns and the list of escapes."""
    half, half_row = np.int32(tile.page_size // 2), np.int32(tile.head_dim // 2)
    code_rows = jax.lax.rem(block.rows, half) + np.int32(tile.page_size)
    tokens = jnp.arange(tile.page_size, dtype=jnp.int32).reshape(block.rows.shape[:2])
    pairs = jax.lax.rem(_lanes(block, tile), half_row) + np.int32(tile.page_size)
    places = _list_places(tile) + np.int32(tile.first_place)
    return [
        plgpu.load(chunk_ref.at[layer, block.rows, head, block.columns]),
        plgpu.load(chunk_ref.at[layer, code_rows, head, block.columns]),
        plgpu.load(_tail(chunk_ref, layer, head, tokens, tile)),
        plgpu.load(_tail(chunk_ref, layer, head, pairs, tile)),
        plgpu.load(
            _tail(chunk_ref, layer, head, places, tile),
            mask=_list_places(tile) < np.int32(tile.num_places),
            other=np.uint8(0),
        ),
    ]


def _unpacked(packed: list[Any], block: _Block, tile: PackedTile) -> Any:
    """Return the numbers of a tile from the bytes of `_load_packed`, as i32."""
    mantissas, code_bytes, row, column_bytes, listed = packed
    shifts = jax.lax.broadcasted_iota(jnp.int32, block.rows.shape, 0) * np.int32(4)
    codes = (code_bytes >> shifts) & np.int32(0xF)
    is_high = jax.lax.div(_lanes(block, tile), np.int32(tile.head_dim // 2))
    column = (column_bytes >> (is_high * np.int32(4))) & np.int32(0xF)
    exponent = exponents_of(codes, row[:, :, None, None] - column[None, None], np.int32(0))
    bits = bits_of(exponent, mantissas)

    def next_from(first: Any) -> Any:
        return _least(jnp.where(codes == ESCAPE, _number(block, tile), _NOWHERE), first)

    def with_escapes() -> Any:
        def place(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            place, number, bits = carry
            escaped = jnp.where(_list_places(tile) == place, listed, np.int32(0)).sum()
            bits = jnp.where(_number(block, tile) == number, bits | (escaped << np.int32(7)), bits)
            return place + np.int32(1), next_from(number + np.int32(1)), bits

        # The end of the list ends the loop: in bytes that were never packed every code may be an escape.
        def goes_on(carry: tuple[Any, Any, Any]) -> Any:
            return (carry[1] < _NOWHERE) & (carry[0] < np.int32(tile.num_places))

        start = (np.int32(0), next_from(np.int32(0)), bits)
        return jax.lax.while_loop(goes_on, place, start)[2]

    return as_numbers(jax.lax.cond(_has_escapes(codes), with_escapes, lambda: bits))


def _list_places(tile: PackedTile) -> Any:
    """Return the indices of the places for escapes, up to the next power of two, as blocks require."""
    return jnp.arange(pl.next_power_of_2(tile.num_places), dtype=jnp.int32)


def _lanes(block: _Block, tile: PackedTile) -> Any:
    """Return the columns of a row, as [groups, numbers]."""
    return jnp.arange(tile.head_dim, dtype=jnp.int32).reshape(block.columns.shape[2:])


def _switch(index: Any, branches: list[Any]) -> Any:
    """Return the result of the branch at `index`."""
    return jax.lax.switch(index, branches) if len(branches) > 1 else branches[0]()


def _joined(codes: Any) -> Any:
    """Join i32[2, ...] to bytes of two codes each."""
    shifts = jax.lax.broadcasted_iota(jnp.int32, codes.shape, 0) * np.int32(4)
    return (codes << shifts).sum(axis=0)


def _number(block: _Block, tile: PackedTile) -> Any:
    """Return the position of each number in its tile."""
    return block.rows * np.int32(tile.head_dim) + block.columns


def _has_escapes(codes: Any) -> Any:
    """Return whether any code is an escape, in half the time of counting them."""
    return _over_all(jnp.max, codes) == ESCAPE


def _least(keys: Any, first: Any) -> Any:
    """Return the least key of a block from `first` on: as unsigned differences, lower keys become large."""
    distance = jax.lax.bitcast_convert_type(keys - first, jnp.uint32)
    return jax.lax.bitcast_convert_type(_over_all(jnp.min, distance), jnp.int32) + first


def _over_all(reduce: Any, block: Any) -> Any:
    """Reduce a whole block: first within a thread, then over rows, then over lanes."""
    return reduce(reduce(reduce(reduce(block, axis=3), axis=0), axis=0), axis=0)


def _tail(chunk_ref: Any, layer: Any, head: Any, places: Any, tile: PackedTile) -> Any:
    """Return the references of the tail's bytes at `places`."""
    row = np.int32(tile.first_tail_row) + jax.lax.div(places, np.int32(tile.head_dim))
    return chunk_ref.at[layer, row, head, jax.lax.rem(places, np.int32(tile.head_dim))]
