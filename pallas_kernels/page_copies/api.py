"""Page copies in both directions: argument checks, choice of a back end, and the XLA back end.

Owns: the meaning of a batch of pages and of its padding.
Does not know: what pages hold, or where the arrays go.

Every layer has its own pool. A *chunk* here is one page of all layers as one array
[num_layers, rows, 2 * num_kv_heads, head_dim], which moves between memories in one piece. A page has one row
for each token, and may have more rows.
Batches have fixed sizes, and page 0 is padding. Gathering it reads the pool's dummy page, whatever that
holds. Scattering to it, or to a page past the pool, writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp

from pallas_kernels.devices import triton_device_limit

_BACKENDS = ("xla", "pallas_triton")
_MIN_LANES = 16  # Triton's blocks are powers of two; narrower rows are not worth a kernel


class PageCopyError(ValueError):
    """An argument does not fit the pools; the message says which, and what would fit."""


def choose_backend(page_shape: tuple[int, ...], device: jax.Device) -> str:
    """Return the fastest back end for pages of [rows, 2 * num_kv_heads, head_dim] on `device`."""
    supported = _triton_supports(page_shape) and triton_device_limit(device) is None
    return "pallas_triton" if supported else "xla"


def gather_pages(
    pools: Sequence[Annotated[jax.Array, "[num_pages, rows, 2 * num_kv_heads, head_dim]"]],
    pages: Annotated[jax.Array, "i32[num_chunks]"],
    *,
    backend: str = "xla",
    interpret: bool = False,
) -> list[Annotated[jax.Array, "[num_layers, rows, 2 * num_kv_heads, head_dim]"]]:
    """Return one chunk for every entry of `pages`.

    Args:
      pools: one per layer, [num_pages, rows, 2 * num_kv_heads, head_dim] each.
      pages: i32[num_chunks], page numbers inside the pools.
      backend: "xla" or "pallas_triton"; see `choose_backend`.
      interpret: run the Triton kernel without a GPU, slowly.

    Returns:
      num_chunks arrays [num_layers, rows, 2 * num_kv_heads, head_dim].

    Raises:
      PageCopyError: shapes do not match, or the back end does not support them.
    """
    check_pools(pools, pages, backend)
    if backend == "pallas_triton":
        # Imported late: upstream has deprecated this back end, and only its own file may depend on it.
        from pallas_kernels.page_copies.pallas_triton import triton_gather

        return triton_gather(pools, pages, interpret=interpret)
    chunks = jnp.stack([pool.at[pages].get(mode="promise_in_bounds") for pool in pools], axis=1)
    return [chunks[i] for i in range(pages.shape[0])]


def scatter_pages(
    pools: Sequence[Annotated[jax.Array, "[num_pages, rows, 2 * num_kv_heads, head_dim]"]],
    chunks: Sequence[Annotated[jax.Array, "[num_layers, rows, 2 * num_kv_heads, head_dim]"]],
    pages: Annotated[jax.Array, "i32[num_chunks]"],
    *,
    backend: str = "xla",
    interpret: bool = False,
) -> list[Annotated[jax.Array, "[num_pages, rows, 2 * num_kv_heads, head_dim]"]]:
    """Return the pools with every chunk written to its page, in place if the pools are donated.

    Args:
      pools: as in `gather_pages`.
      chunks: arrays [num_layers, rows, 2 * num_kv_heads, head_dim]; padding may repeat one array.
      pages: i32[len(chunks)], distinct except for padding, which is 0 or past the pool.
      backend: as in `gather_pages`.
      interpret: as in `gather_pages`.

    Raises:
      PageCopyError: shapes do not match, or the back end does not support them.
    """
    check_pools(pools, pages, backend)
    check_chunks(chunks, pages, (len(pools), *pools[0].shape[1:]), pools[0].dtype)
    num_pages = pools[0].shape[0]
    if backend == "pallas_triton":
        from pallas_kernels.page_copies.pallas_triton import triton_scatter

        return triton_scatter(pools, chunks, pages, interpret=interpret)
    stacked = jnp.stack(chunks)
    pages = jnp.where(pages > 0, pages, num_pages)
    return [
        pool.at[pages].set(stacked[:, layer], mode="drop", unique_indices=True)
        for layer, pool in enumerate(pools)
    ]


def _triton_supports(page_shape: tuple[int, ...]) -> bool:
    num_rows, _, head_dim = page_shape
    return head_dim & (head_dim - 1) == 0 and num_rows >= _MIN_LANES and head_dim >= _MIN_LANES


def check_pools(pools: Sequence[jax.Array], pages: jax.Array, backend: str) -> None:
    """Raise PageCopyError if pools and pages do not match, or the back end does not support them."""
    shapes = {(pool.shape, pool.dtype.name) for pool in pools}
    if len(shapes) != 1 or pools[0].ndim != 4:
        raise PageCopyError(
            f"pools are {sorted(shapes)}, but must be one or more of one shape "
            "(num_pages, rows, 2 * num_kv_heads, head_dim) and one dtype"
        )
    if pages.ndim != 1 or pages.dtype != jnp.int32:
        raise PageCopyError(f"pages are {pages.dtype.name}{list(pages.shape)}, but must be int32[num_chunks]")
    if backend not in _BACKENDS:
        raise PageCopyError(f"backend is {backend!r}, but must be one of {_BACKENDS}")
    if backend == "pallas_triton" and not _triton_supports(pools[0].shape[1:]):
        raise PageCopyError(
            f"pallas_triton copies pages of {_MIN_LANES} or more rows and head_dim, a power of two; "
            f"use backend 'xla' for {pools[0].shape[1:]}"
        )


def check_chunks(
    chunks: Sequence[jax.Array], pages: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype
) -> None:
    """Raise PageCopyError if chunks differ from the given shape or dtype, or in number from the pages."""
    for i, chunk in enumerate(chunks):
        if chunk.shape != shape or chunk.dtype != dtype:
            raise PageCopyError(
                f"chunks[{i}] is {chunk.dtype.name}{list(chunk.shape)}, but must be "
                f"{dtype.name}{list(shape)} as the pools are"
            )
    if len(chunks) != pages.shape[0]:
        raise PageCopyError(f"{len(chunks)} chunks are given for {pages.shape[0]} pages")
