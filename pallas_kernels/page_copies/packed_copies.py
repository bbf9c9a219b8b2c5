"""The copies of `api` with chunks in packed form, which `packing` describes.

Owns: their argument checks and the choice of a back end.
Does not know: what the caller does with a chunk that cannot be packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.page_copies.api import PageCopyError, check_chunks, check_pools
from pallas_kernels.page_copies.packing import PackedTile, pack, packed_tile, unpack


def gather_packed(
    pools: Sequence[jax.Array], pages: jax.Array, *, backend: str = "xla", interpret: bool = False
) -> tuple[list[jax.Array], jax.Array]:
    """Return one packed chunk for every entry of `pages`, and whether each chunk is complete.

    Args:
      pools: bfloat16, one per layer, [num_pages, page_size, 2 * num_kv_heads, head_dim] each.
      pages: as in `gather_pages`.
      backend: as in `gather_pages`; all back ends give the same bits.
      interpret: as in `gather_pages`.

    Returns:
      num_chunks arrays u8[num_layers, num_rows, 2 * num_kv_heads, head_dim], and i32[num_chunks]: the number
      of escapes that had no place, in the chunk's worst tile. A chunk with more than 0 must not be scattered.

    Raises:
      PageCopyError: as in `gather_pages`, or pages of this shape or dtype cannot be packed.
    """
    check_pools(pools, pages, backend)
    _tile(pools[0])
    if backend == "pallas_triton":
        from pallas_kernels.page_copies.triton_packing import triton_pack

        return triton_pack(pools, pages, interpret=interpret)
    layers = [pack(pool.at[pages].get(mode="promise_in_bounds")) for pool in pools]
    chunks = jnp.stack([packed for packed, _ in layers], axis=1)
    num_unplaced = jnp.stack([unplaced for _, unplaced in layers]).max(axis=0)
    return [chunks[i] for i in range(pages.shape[0])], num_unplaced


def scatter_packed(
    pools: Sequence[jax.Array],
    chunks: Sequence[jax.Array],
    pages: jax.Array,
    *,
    backend: str = "xla",
    interpret: bool = False,
) -> list[jax.Array]:
    """Return the pools with every chunk unpacked to its page, in place if the pools are donated.

    Args:
      pools: as in `gather_packed`.
      chunks: complete chunks from `gather_packed`; padding may repeat one array.
      pages: as in `scatter_pages`.
      backend: as in `gather_pages`.
      interpret: as in `gather_pages`.

    Raises:
      PageCopyError: as in `scatter_pages`, or pages of this shape or dtype cannot be packed.
    """
    check_pools(pools, pages, backend)
    tile = _tile(pools[0])
    shape = (len(pools), tile.num_rows, *pools[0].shape[2:])
    check_chunks(chunks, pages, shape, jnp.dtype(jnp.uint8))
    if backend == "pallas_triton":
        from pallas_kernels.page_copies.triton_packing import triton_unpack

        return triton_unpack(pools, chunks, pages, interpret=interpret)
    stacked = jnp.stack(chunks)
    pages = jnp.where(pages > 0, pages, pools[0].shape[0])
    return [
        pool.at[pages].set(unpack(stacked[:, layer], tile.page_size), mode="drop", unique_indices=True)
        for layer, pool in enumerate(pools)
    ]


def _tile(pool: jax.Array) -> PackedTile:
    _, page_size, _, head_dim = pool.shape
    tile = packed_tile(page_size, head_dim)
    if tile is None or pool.dtype != jnp.bfloat16:
        raise PageCopyError(
            f"pools are {pool.dtype.name}{list(pool.shape)}, but only long bfloat16 pages with an even "
            "number of rows can be packed"
        )
    return tile
