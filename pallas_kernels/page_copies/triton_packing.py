"""Packing and unpacking of pages through Pallas' Triton back end: NVIDIA GPUs from Ampere on.

Owns: the two kernels and their launches. Does not know what the format is for.
Called by: `packed_copies`. Upstream has deprecated this back end; see `pallas_triton`, whose launches these
are like: a program moves one layer and head row of a few chunks, one tile after the other.

The halves of a tile whose codes share bytes are two blocks from the load to the store, so that no number
moves between lanes. An escape's place is a sum over the numbers before it: over its row, and over the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.page_copies.packing import (
    ESCAPE,
    PackedTile,
    as_bits,
    as_numbers,
    bits_of,
    codes_of,
    columns_below,
    exponents,
    exponents_of,
    rows_of,
    signed_mantissas,
)
from pallas_kernels.page_copies.pallas_triton import in_launches, launches, like, write_in_place

_NUMBERS_PER_WARP = 1024  # 32 a thread, of each of the few blocks of 32 bits that are alive at once


def triton_pack(
    pools: Sequence[jax.Array], pages: jax.Array, *, interpret: bool
) -> tuple[list[jax.Array], jax.Array]:
    """See `packed_copies.gather_packed`; arguments are already checked."""
    chunks: list[jax.Array] = []
    num_unplaced: list[jax.Array] = []
    for first, num_chunks in launches(pools[0], pages.shape[0]):
        *some, unplaced = _pack(list(pools), pages, first, num_chunks=num_chunks, interpret=interpret)
        chunks += some
        num_unplaced.append(unplaced.max(axis=(1, 2)))
    return chunks, jnp.concatenate(num_unplaced)


def triton_unpack(
    pools: Sequence[jax.Array], chunks: Sequence[jax.Array], pages: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """See `packed_copies.scatter_packed`; arguments are already checked."""
    return in_launches(functools.partial(_unpack, interpret=interpret), pools, chunks, pages)


@functools.partial(jax.jit, static_argnames=("num_chunks", "interpret"))  # lowered once for all launches
def _pack(
    pools: list[jax.Array], pages: jax.Array, first: jax.Array, *, num_chunks: int, interpret: bool
) -> list[jax.Array]:
    """One launch: its chunks, then i32[num_chunks, num_layers, head rows] escapes without a place."""
    num_heads, tile = pools[0].shape[2], _tile(pools[0])
    shape = (len(pools), tile.num_rows, num_heads, tile.head_dim)
    packed: list[jax.Array] = pl.pallas_call(
        functools.partial(_pack_kernel, num_pools=len(pools), tile=tile),
        out_shape=[
            *[like(pools[0], shape, jnp.uint8)] * num_chunks,
            like(pools[0], (num_chunks, len(pools), num_heads), jnp.int32),
        ],
        grid=(len(pools), num_heads),
        compiler_params=plgpu.CompilerParams(num_warps=_num_warps(tile), num_stages=1),
        interpret=interpret,
        name=f"pack_pages_{num_chunks}",
    )(pages, first, *pools)
    return packed


@functools.partial(jax.jit, static_argnames=("interpret",))
def _unpack(
    pools: list[jax.Array], chunks: list[jax.Array], pages: jax.Array, first: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """One launch."""
    tile = _tile(pools[0])
    kernel = functools.partial(_unpack_kernel, num_chunks=len(chunks), tile=tile)
    write = write_in_place(kernel, "unpack_pages", pools, len(chunks), _num_warps(tile), interpret=interpret)
    return list(write(pages, first, *chunks, *pools))  # as `pools`: a compiled caller tells lists from tuples


def _tile(pool: jax.Array) -> PackedTile:
    return PackedTile(pool.shape[1], pool.shape[3])


def _num_warps(tile: PackedTile) -> int:
    return min(max(tile.page_size * tile.head_dim // _NUMBERS_PER_WARP, 1), 8)


def _halves(tile: PackedTile) -> list[Any]:
    """Rows of a tile whose codes are in the low and in the high half of a byte."""
    half = tile.page_size // 2
    return [pl.ds(0, half), pl.ds(half, half)]


def _pack_kernel(pages_ref: Any, first_ref: Any, *refs: Any, num_pools: int, tile: PackedTile) -> None:
    """One layer and head row of every chunk; `refs` are the pools, the chunks, and what had no place."""
    pool_refs, chunk_refs, lost_ref = refs[:num_pools], refs[num_pools:-1], refs[-1]
    layer, head, first = pl.program_id(0), pl.program_id(1), first_ref[0]
    for i, chunk_ref in enumerate(chunk_refs):
        page = pages_ref[first + i]

        def load(pool_ref: Any, page: Any = page) -> list[Any]:
            return [pool_ref[page, rows, head, :] for rows in _halves(tile)]

        loads = [functools.partial(load, pool_ref) for pool_ref in pool_refs]
        halves = jax.lax.switch(layer, loads) if len(loads) > 1 else loads[0]()
        lost_ref[i, layer, head] = _store_tile(chunk_ref, halves, layer, head, tile)


def _store_tile(chunk_ref: Any, halves: list[Any], layer: Any, head: Any, tile: PackedTile) -> Any:
    """Pack one tile; returns how many escapes have no place."""
    half = tile.page_size // 2
    found: list[Any] = [exponents(as_bits(numbers)) for numbers in halves]
    highest = jnp.maximum(*(exponent.max(axis=0) for exponent in found))
    column = columns_below(highest)
    nibbles: Any = None
    num_escapes = np.int32(0)
    for part, rows in enumerate(_halves(tile)):
        chunk_ref[layer, rows, head, :] = signed_mantissas(as_bits(halves[part])).astype(jnp.uint8)
        row = rows_of(found[part], column[None, :])
        codes = codes_of(found[part], row[:, None] - column[None, :])
        nibbles = codes if part == 0 else nibbles | (codes << np.int32(4))
        tokens = jnp.arange(half, dtype=jnp.int32) + np.int32(part * half)
        plgpu.store(_tail(chunk_ref, layer, head, tokens, tile), row.astype(jnp.uint8))
        is_escape, places, num_escapes = _places(codes, num_escapes, tile)
        has_place = is_escape & (places < np.int32(tile.num_tail_rows * tile.head_dim))
        escape_refs = _tail(chunk_ref, layer, head, places, tile)
        plgpu.store(escape_refs, found[part].astype(jnp.uint8), mask=has_place)
    chunk_ref[layer, pl.ds(tile.page_size, half), head, :] = nibbles.astype(jnp.uint8)
    _store_columns(chunk_ref, column, layer, head, tile)
    lanes = jnp.arange(tile.head_dim, dtype=jnp.int32)
    for row in range(tile.num_tail_rows):
        places = lanes + np.int32(row * tile.head_dim)
        unused = _tail(chunk_ref, layer, head, places, tile)
        is_unused = places >= np.int32(tile.first_place) + num_escapes
        plgpu.store(unused, jnp.zeros(lanes.shape, jnp.uint8), mask=is_unused)
    return jnp.maximum(num_escapes - np.int32(tile.num_places), np.int32(0))


def _store_columns(chunk_ref: Any, column: Any, layer: Any, head: Any, tile: PackedTile) -> None:
    """What columns count by, two to a byte: the one step in which anything moves between lanes."""
    half = tile.head_dim // 2
    is_high = jnp.arange(2, dtype=jnp.int32)[:, None]
    columns = (column.reshape(2, half) << (is_high * np.int32(4))).sum(axis=0)
    places = jnp.arange(half, dtype=jnp.int32) + np.int32(tile.page_size)
    plgpu.store(_tail(chunk_ref, layer, head, places, tile), columns.astype(jnp.uint8))


def _unpack_kernel(pages_ref: Any, first_ref: Any, *refs: Any, num_chunks: int, tile: PackedTile) -> None:
    """The same the other way; `refs` are the chunks, the aliased pools (unused), then the pools."""
    chunk_refs, pool_refs = refs[:num_chunks], refs[num_chunks + (len(refs) - num_chunks) // 2 :]
    layer, head, first = pl.program_id(0), pl.program_id(1), first_ref[0]
    num_pages = pool_refs[0].shape[0]
    for i, chunk_ref in enumerate(chunk_refs):
        page = pages_ref[first + i]
        halves = _load_tile(chunk_ref, layer, head, tile)
        for pool_index, pool_ref in enumerate(pool_refs):

            @pl.when((layer == pool_index) & (page > 0) & (page < num_pages))
            def store(page: Any = page, halves: Any = halves, pool_ref: Any = pool_ref) -> None:
                for rows, numbers in zip(_halves(tile), halves, strict=True):
                    pool_ref[page, rows, head, :] = numbers


def _load_tile(chunk_ref: Any, layer: Any, head: Any, tile: PackedTile) -> list[Any]:
    """Both halves of one tile."""
    half = tile.page_size // 2
    nibbles = chunk_ref[layer, pl.ds(tile.page_size, half), head, :].astype(jnp.int32)
    lanes, half_row = jnp.arange(tile.head_dim, dtype=jnp.int32), np.int32(tile.head_dim // 2)
    column_refs = _tail(chunk_ref, layer, head, jax.lax.rem(lanes, half_row) + np.int32(tile.page_size), tile)
    columns = plgpu.load(column_refs).astype(jnp.int32)
    column = (columns >> (jax.lax.div(lanes, half_row) * np.int32(4))) & np.int32(0xF)
    num_escapes = np.int32(0)
    halves = []
    for part, rows in enumerate(_halves(tile)):
        codes = (nibbles >> np.int32(4 * part)) & np.int32(0xF)
        tokens = jnp.arange(half, dtype=jnp.int32) + np.int32(part * half)
        row = plgpu.load(_tail(chunk_ref, layer, head, tokens, tile)).astype(jnp.int32)
        is_escape, places, num_escapes = _places(codes, num_escapes, tile)
        has_place = is_escape & (places < np.int32(tile.num_tail_rows * tile.head_dim))
        escape_refs = _tail(chunk_ref, layer, head, places, tile)
        escaped = plgpu.load(escape_refs, mask=has_place, other=np.uint8(0)).astype(jnp.int32)
        exponent = exponents_of(codes, row[:, None] - column[None, :], escaped)
        mantissas = chunk_ref[layer, rows, head, :].astype(jnp.int32)
        halves.append(as_numbers(bits_of(exponent, mantissas)))
    return halves


def _places(codes: Any, num_before: Any, tile: PackedTile) -> tuple[Any, Any, Any]:
    """Which of [rows, head_dim] codes are escapes, their places in the tail, how many there are so far."""
    is_escape = codes == ESCAPE
    ones = is_escape.astype(jnp.int32)
    in_row = ones.sum(axis=1)
    rows_before = jax.lax.cumsum(in_row, axis=0) - in_row
    lanes_before = jax.lax.cumsum(ones, axis=1) - ones
    places = np.int32(tile.first_place) + num_before + rows_before[:, None] + lanes_before
    return is_escape, places, num_before + in_row.sum()


def _tail(chunk_ref: Any, layer: Any, head: Any, places: Any, tile: PackedTile) -> Any:
    """Where bytes of the tail are."""
    row = np.int32(tile.first_tail_row) + jax.lax.div(places, np.int32(tile.head_dim))
    return chunk_ref.at[layer, row, head, jax.lax.rem(places, np.int32(tile.head_dim))]
