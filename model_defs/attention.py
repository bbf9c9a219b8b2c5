"""Attention: the protocol that models call, and a paged and a dense implementation.

`PagedAttention` writes the step's keys and values into the layer's page pool and attends through the page
lists, one KV head group per device. `DenseAttention` is the reference for tests: one whole sequence, no
pages, no kernel, no shared code. The models know only the protocol.
"""

import functools
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model_defs.sharding import KV_PAGES_SPEC, TENSOR_AXIS, AnyMesh
from pallas_kernels.ragged_paged_attention import TileSpec, ragged_paged_attention, stored_as, write_kv

Queries = Annotated[jax.Array, "f[T, num_heads, head_dim]"]
"""Queries of T tokens, and the attention that is computed for them."""
KeysOrValues = Annotated[jax.Array, "f[T, num_kv_heads, head_dim]"]
"""Keys, or values, of T tokens."""
_HEADS_SPEC = PartitionSpec(None, TENSOR_AXIS, None)


class Attention(Protocol):
    """Causal attention of one layer, scaled by head_dim**-0.5."""

    def __call__(self, layer_index: int, q: Queries, k: KeysOrValues, v: KeysOrValues) -> Queries:
        """Return [T, num_heads, head_dim] for q of that shape and k, v [T, num_kv_heads, head_dim]."""
        ...


class RaggedBatch(NamedTuple):
    """Ragged metadata of a step, shared by all layers, as a pytree. R rows, P pages per row, T tokens."""

    write_slots: jax.Array  # i32[T]: page * page_size + offset; padding points past the pool
    kv_lens: jax.Array  # i32[R]
    page_indices: jax.Array  # i32[R, P]
    cu_q_lens: jax.Array  # i32[R + 1]
    num_seqs: jax.Array  # i32[1]
    tiles: jax.Array  # i32[tiles_len]


class PagedAttention:
    """Attention over per-layer page pools, tensor parallel by KV head.

    `kv_pages` is one pool per layer, [num_pages, page_size, 2 * num_kv_heads, head_dim], split by KV head
    over "tp". After the model has run, the attribute holds the updated pools. The compiled step returns
    them, and donates the old ones, which are its arguments. `tile_spec` is the per-shard spec that
    `batch.tiles` was built for; with None the kernel makes its own tiles and ignores `batch.tiles`.
    """

    def __init__(
        self,
        kv_pages: list[jax.Array],
        batch: RaggedBatch,
        *,
        mesh: AnyMesh,
        tile_spec: TileSpec | None = None,
        backend: str = "auto",
    ) -> None:
        """Store the pools and metadata of one step."""
        self.kv_pages = list(kv_pages)
        self._batch, self._mesh, self._tile_spec, self._backend = batch, mesh, tile_spec, backend

    def __call__(self, layer_index: int, q: Queries, k: KeysOrValues, v: KeysOrValues) -> Queries:
        """Write k and v, then attend; see `Attention`."""
        self.kv_pages[layer_index], out = _write_and_attend(
            self.kv_pages[layer_index],
            q,
            k,
            v,
            self._batch,
            mesh=self._mesh,
            tile_spec=self._tile_spec,
            backend=self._backend,
        )
        return out


@functools.partial(jax.jit, static_argnames=("mesh", "tile_spec", "backend"))  # lowered once for all layers
def _write_and_attend(
    pages: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    *,
    mesh: AnyMesh,
    tile_spec: TileSpec | None,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """Write new tokens to a layer's pool and compute attention, each device for its own KV heads."""
    sharded = jax.shard_map(
        functools.partial(_one_shard, spec=tile_spec, backend=backend),
        mesh=mesh,
        in_specs=(KV_PAGES_SPEC, _HEADS_SPEC, _HEADS_SPEC, _HEADS_SPEC, PartitionSpec()),
        out_specs=(KV_PAGES_SPEC, _HEADS_SPEC),
        check_vma=False,  # kernels do not declare the axes over which their outputs vary
    )
    result: tuple[jax.Array, jax.Array] = sharded(pages, q, k, v, batch)
    return result


def _one_shard(
    pages: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    *,
    spec: TileSpec | None,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """Write and attend on one device, for its KV heads and their query heads."""
    kv_dtype = None if spec is None else spec.kv_dtype
    stored: dict[str, Any] = {} if spec is None else {"page_size": spec.page_size, "backend": spec.backend}
    pages = write_kv(pages, k, v, batch.write_slots, kv_dtype=kv_dtype, **stored)
    out = ragged_paged_attention(
        q,
        pages,
        batch.kv_lens,
        batch.page_indices,
        batch.cu_q_lens,
        batch.num_seqs,
        sm_scale=q.shape[-1] ** -0.5,
        metadata=None if spec is None else (spec, batch.tiles),
        backend=backend,
        kv_dtype=kv_dtype,
    )
    return pages, out


class DenseAttention:
    """Causal attention over one whole sequence of T tokens at positions 0 .. T - 1, in float32.

    With a `kv_dtype`, keys and values are rounded as if they were stored in pages of that type.
    """

    def __init__(self, kv_dtype: str | None = None) -> None:
        """Store the type that keys and values are rounded to."""
        self._kv_dtype = kv_dtype

    def __call__(self, layer_index: int, q: Queries, k: KeysOrValues, v: KeysOrValues) -> Queries:
        """Compute attention; see `Attention`. No state is stored, so `layer_index` is unused."""
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // k.shape[1]
        k, v = stored_as(k, self._kv_dtype), stored_as(v, self._kv_dtype)
        wide_q = q.astype(jnp.float32).reshape(num_tokens, -1, group, head_dim) * head_dim**-0.5
        scores = jnp.einsum(
            "tkgd,skd->kgts", wide_q, k.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        visible = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        out = jnp.einsum(
            "kgts,skd->tkgd", weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return out.reshape(q.shape).astype(q.dtype)
