"""Attention: the protocol that models call, and a paged and a dense implementation.

`PagedAttention` writes the step's keys and values into the layer's page pool and attends through the page
lists, one KV head group per device. `DenseAttention` is the reference for tests: one whole sequence, no
pages, no kernel, no shared code. The models know only the protocol.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model_defs.config import LayerKind, ModelConfig
from model_defs.errors import UnsupportedModelError
from model_defs.sharding import KV_PAGES_SPEC, TENSOR_AXIS, AnyMesh
from pallas_kernels.ragged_paged_attention import TileSpec, ragged_paged_attention, stored_as, write_kv

Queries = Annotated[jax.Array, "f[T, num_heads, head_dim]"]
"""Queries of T tokens, and the attention that is computed for them."""
KeysOrValues = Annotated[jax.Array, "f[T, num_kv_heads, head_dim]"]
"""Keys, or values, of T tokens."""
Sinks = Annotated[jax.Array, "f[num_heads]"]
"""Logits of attention sinks."""
_HEADS_SPEC = PartitionSpec(None, TENSOR_AXIS, None)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What a layer's attention does; hashable, so that it can be a static argument of a compiled step.

    Attributes:
      window: tokens that a token sees, itself included; None means all before it.
      softcap: a scaled score s becomes softcap * tanh(s / softcap); None leaves it.
      scale: factor on scores; None means head_dim**-0.5.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

    def scale_of(self, head_dim: int) -> float:
        """Return the factor on the scores of heads of this size."""
        return float(head_dim) ** -0.5 if self.scale is None else self.scale


FULL = AttentionOptions()
"""Options of plain causal attention."""


def attention_options(config: ModelConfig, kind: LayerKind) -> AttentionOptions:
    """Return the options of a layer of `kind`."""
    return AttentionOptions(kind.window, config.attention_softcap, config.attention_scale)


def refuse_features(config: ModelConfig, by: str) -> None:
    """Raise UnsupportedModelError if the attention of some layer is not plain, for code that has no other."""
    for kind in sorted(config.kinds, key=lambda kind: kind.window or config.max_position_embeddings):
        refuse_options(attention_options(config, kind), config.has_sinks, by)


def refuse_options(options: AttentionOptions, has_sinks: bool, by: str) -> None:
    """Raise UnsupportedModelError unless attention is plain; `by` names what has no other."""
    found = [f"{name}={value!r}" for name, value in dataclasses.asdict(options).items() if value is not None]
    found += ["sinks"] * has_sinks
    if found:
        hint = "" if options.window is None else f"; set max_position_embeddings to at most {options.window}"
        raise UnsupportedModelError(f"attention with {', '.join(found)} is not supported by {by}{hint}")


class Attention(Protocol):
    """Causal attention of one layer."""

    def __call__(
        self,
        layer_index: int,
        q: Queries,
        k: KeysOrValues,
        v: KeysOrValues,
        *,
        options: AttentionOptions = FULL,
        sinks: Sinks | None = None,
    ) -> Queries:
        """Return [T, num_heads, head_dim] for q of that shape and k, v [T, num_kv_heads, head_dim].

        `sinks` are logits that take part in each head's softmax, and have no value.
        """
        ...


class RaggedBatch(NamedTuple):
    """Ragged metadata of a step, shared by all layers, as a pytree. R rows, P pages per row, T tokens.

    `tiles` has the attention kernel's list for each distinct window of the layers.
    """

    write_slots: jax.Array  # i32[T]: page * page_size + offset; padding points past the pool
    kv_lens: jax.Array  # i32[R]
    page_indices: jax.Array  # i32[R, P]
    cu_q_lens: jax.Array  # i32[R + 1]
    num_seqs: jax.Array  # i32[1]
    tiles: tuple[jax.Array, ...]  # i32[tiles_len] each


class PagedAttention:
    """Attention over per-layer page pools, tensor parallel by KV head.

    `kv_pages` is one pool per layer, [num_pages, page_size, 2 * num_kv_heads, head_dim], split by KV head
    over "tp". After the model has run, the attribute holds the updated pools. The compiled step returns
    them, and donates the old ones, which are its arguments. `tile_specs` are the per-shard specs that
    `batch.tiles` were built for, one for each distinct window; without them the kernel makes its own tiles
    and ignores `batch.tiles`.
    """

    def __init__(
        self,
        kv_pages: list[jax.Array],
        batch: RaggedBatch,
        *,
        mesh: AnyMesh,
        tile_specs: Sequence[TileSpec] = (),
        backend: str = "auto",
    ) -> None:
        """Store the pools and metadata of one step."""
        self.kv_pages = list(kv_pages)
        self._batch, self._mesh, self._backend = batch, mesh, backend
        pairs = zip(tile_specs, batch.tiles, strict=True) if tile_specs else ()
        self._lists = {spec.window: (spec, tiles) for spec, tiles in pairs}

    def __call__(
        self,
        layer_index: int,
        q: Queries,
        k: KeysOrValues,
        v: KeysOrValues,
        *,
        options: AttentionOptions = FULL,
        sinks: Sinks | None = None,
    ) -> Queries:
        """Write k and v, then attend; see `Attention`.

        Raises:
          KeyError: there are lists, but none for the options' window.
        """
        spec, tiles = self._lists[options.window] if self._lists else (None, None)
        self.kv_pages[layer_index], out = _write_and_attend(
            self.kv_pages[layer_index],
            q,
            k,
            v,
            self._batch._replace(tiles=() if tiles is None else (tiles,)),
            sinks,
            options=options,
            mesh=self._mesh,
            tile_spec=spec,
            backend=self._backend,
        )
        return out


# Lowered once for all layers of a kind.
@functools.partial(jax.jit, static_argnames=("options", "mesh", "tile_spec", "backend"))
def _write_and_attend(
    pages: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    sinks: jax.Array | None,
    *,
    options: AttentionOptions,
    mesh: AnyMesh,
    tile_spec: TileSpec | None,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """Write new tokens to a layer's pool and compute attention, each device for its own KV heads."""
    sharded = jax.shard_map(
        functools.partial(_one_shard, options=options, spec=tile_spec, backend=backend),
        mesh=mesh,
        in_specs=(
            KV_PAGES_SPEC,
            _HEADS_SPEC,
            _HEADS_SPEC,
            _HEADS_SPEC,
            PartitionSpec(),
            PartitionSpec(TENSOR_AXIS),
        ),
        out_specs=(KV_PAGES_SPEC, _HEADS_SPEC),
        check_vma=False,  # kernels do not declare the axes over which their outputs vary
    )
    result: tuple[jax.Array, jax.Array] = sharded(pages, q, k, v, batch, sinks)
    return result


def _one_shard(
    pages: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    sinks: jax.Array | None,
    *,
    options: AttentionOptions,
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
        sm_scale=options.scale_of(q.shape[-1]),
        window=options.window,
        softcap=options.softcap,
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        metadata=None if spec is None else (spec, batch.tiles[0]),
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

    def __call__(
        self,
        layer_index: int,
        q: Queries,
        k: KeysOrValues,
        v: KeysOrValues,
        *,
        options: AttentionOptions = FULL,
        sinks: Sinks | None = None,
    ) -> Queries:
        """Compute attention; see `Attention`. No state is stored, so `layer_index` is unused."""
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // k.shape[1]
        k, v = stored_as(k, self._kv_dtype), stored_as(v, self._kv_dtype)
        wide_q = q.astype(jnp.float32).reshape(num_tokens, -1, group, head_dim) * options.scale_of(head_dim)
        scores = jnp.einsum(
            "tkgd,skd->kgts", wide_q, k.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        visible = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
        if options.window is not None:
            visible &= ~jnp.tril(visible, -options.window)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            logits = sinks.astype(jnp.float32).reshape(-1, group, 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(logits, (*scores.shape[:3], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens]
        out = jnp.einsum(
            "kgts,skd->tkgd", weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return out.reshape(q.shape).astype(q.dtype)
