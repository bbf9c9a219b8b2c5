"""Public calls of attention: argument checks, choice of a back end, dispatch.

Owns: the checks of arguments that no back end supports, and the dispatch.
Does not know: the limits of a back end (`backends` does), or how it works.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention.backends import DTYPES, AttentionHeads, choose_backend
from pallas_kernels.ragged_paged_attention.block_sizes import BlockSizes
from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.metadata import build_tiles_traced
from pallas_kernels.ragged_paged_attention.page_formats import PageKind, page_dtype, page_size_of
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.tile_specs import TileSpec, make_tile_spec
from pallas_kernels.ragged_paged_attention.xla import xla_attention

PAGE_SIZES = (16, 32, 64)


def ragged_paged_attention(
    q: Annotated[jax.Array, "f[num_tokens, num_q_heads, head_dim]"],
    kv_pages: Annotated[jax.Array, "[num_pages, page_rows, 2 * num_kv_heads, head_dim]"],
    kv_lens: Annotated[jax.Array, "i32[max_num_seqs]"],
    page_indices: Annotated[jax.Array, "i32[max_num_seqs, pages_per_seq]"],
    cu_q_lens: Annotated[jax.Array, "i32[max_num_seqs + 1]"],
    num_seqs: Annotated[jax.Array, "i32[1]"],
    *,
    sm_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Annotated[jax.Array, "f32[num_q_heads]"] | None = None,
    metadata: tuple[TileSpec, jax.Array] | None = None,
    backend: str = "auto",
    blocks: BlockSizes | None = None,
    kv_dtype: str | None = None,
    interpret: bool = False,
) -> Annotated[jax.Array, "f[num_tokens, num_q_heads, head_dim]"]:
    """Return the causal attention of ragged query ranges over pages (Pensieve, section 4.4: sub-requests).

    Row i has queries q[cu_q_lens[i]:cu_q_lens[i + 1]] at the last positions of its kv_lens[i] keys. The keys
    must already be in the pages. Two rows may share a page list.

    With a `window`, pages without a key that some query of the row sees may hold anything, and their page
    indices may be any page's, such as a dummy page's. Other pages must hold finite numbers up to the row's
    end.

    Args:
      q: [num_tokens, num_q_heads, head_dim].
      kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim], q's dtype; K at even, V at odd heads.
        With a `kv_dtype`, i8 with rows of scales after those of the tokens; see `page_formats`.
      kv_lens: i32[max_num_seqs], at least the row's number of queries.
      page_indices: i32[max_num_seqs, pages_per_seq]; entries past a row's keys are not read.
      cu_q_lens: i32[max_num_seqs + 1].
      num_seqs: i32[1]; rows from this index on are padding.
      sm_scale: factor on the scores, positive.
      window: a query at position p sees keys p - window + 1 to p; None means all keys up to p.
      softcap: scores become softcap * tanh(score / softcap), before they are masked; None means unchanged.
      sinks: f32[num_q_heads], one more logit of each head in the softmax, without a value; None means none.
      metadata: (spec, tiles) from `tile_spec` and `build_tiles`; None builds tiles on the device.
      backend: "auto" selects the metadata's back end, or else the fastest that supports these arguments here.
      blocks: tile sizes to use instead of the measured ones; only without metadata.
      kv_dtype: format of the pages; None means q's dtype.
      interpret: run a Pallas back end in interpret mode, on any device.

    Returns:
      The result, like q; zero for tokens past cu_q_lens[num_seqs]. Accumulated in float32.

    Raises:
      AttentionArgumentError: no back end supports the arguments, or the selected one does not.
    """
    args = (q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    if kv_dtype not in (None, *KV_DTYPES):
        raise AttentionArgumentError("kv_dtype", kv_dtype, f"must be None or one of {KV_DTYPES}")
    _check_arrays(*args, kv_dtype=kv_dtype)
    if not (math.isfinite(sm_scale) and sm_scale > 0):
        raise AttentionArgumentError("sm_scale", sm_scale, "must be positive and finite")
    if sinks is not None:
        _check_sinks(sinks, q.shape[1])
    if metadata is not None:
        if metadata[0].window != window:
            limit = f"must be {metadata[0].window}, the window of the metadata's tiles"
            raise AttentionArgumentError("window", window, limit)
        backend = metadata[0].backend if backend == "auto" else backend
        blocks = metadata[0].blocks
    spec = tile_spec(
        num_tokens=q.shape[0],
        max_num_seqs=kv_lens.shape[0],
        num_q_heads=q.shape[1],
        num_kv_heads=kv_pages.shape[2] // 2,
        head_dim=q.shape[2],
        page_size=page_size_of(kv_pages, kv_dtype, PAGE_SIZES),
        dtype=q.dtype,
        backend=backend,
        blocks=blocks,
        kv_dtype=kv_dtype,
        scratch_pages=0 if metadata is None else metadata[0].scratch_pages,
        window=window,
        softcap=softcap,
        has_sinks=sinks is not None,
    )
    return _dispatch(
        spec, args, sm_scale=sm_scale, softcap=softcap, sinks=sinks, metadata=metadata, interpret=interpret
    )


def _dispatch(
    spec: TileSpec,
    args: tuple[jax.Array, ...],
    *,
    sm_scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
    metadata: tuple[TileSpec, jax.Array] | None,
    interpret: bool,
) -> jax.Array:
    """Call the back end of a spec that fits `args`, the arrays of `ragged_paged_attention` in order."""
    q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs = args
    if spec.backend == "reference":
        if any(isinstance(arg, jax.core.Tracer) for arg in (*args, sinks)):
            raise AttentionArgumentError("backend", "reference", "is numpy and cannot be jitted; use 'xla'")
        arrays = map(np.asarray, args)
        answer = reference_attention(
            *arrays, sm_scale=sm_scale, page_size=spec.page_size, kv_dtype=spec.kv_dtype, window=spec.window,
            softcap=softcap, sinks=None if sinks is None else np.asarray(sinks),
        )  # fmt: skip
        return jnp.asarray(answer, q.dtype)
    if spec.backend == "xla":
        kind = PageKind(spec.page_size, spec.kv_dtype)
        return xla_attention(
            *args, sm_scale=sm_scale, kind=kind, window=spec.window, softcap=softcap, sinks=sinks
        )
    if metadata is not None and (metadata[0] != spec or metadata[1].shape != (spec.tiles_len,)):
        raise AttentionArgumentError(
            "metadata", metadata[0], f"was made for another call; this one needs {spec}"
        )
    tiles = metadata[1] if metadata is not None else build_tiles_traced(spec, cu_q_lens, kv_lens, num_seqs)
    # Imported late: jax-triton is an extra, upstream has deprecated Pallas' Triton back end and calls its
    # Mosaic one unstable, and only their own files may depend on them.
    if spec.backend == "jax_triton":
        from pallas_kernels.ragged_paged_attention.jax_triton import jax_triton_attention

        return jax_triton_attention(spec, q, kv_pages, page_indices, tiles, sm_scale=sm_scale)
    from pallas_kernels.ragged_paged_attention.pallas_triton import triton_attention

    buffers: list[jax.Array] = []
    if spec.backend == "pallas_mosaic_gpu":
        from pallas_kernels.ragged_paged_attention.pallas_mosaic_gpu import mosaic_attention
        from pallas_kernels.ragged_paged_attention.pallas_triton_scratch import decode_pages

        scratch = None
        if spec.scratch_pages:
            scratch = decode_pages(spec, kv_pages, tiles, dtype=q.dtype, interpret=interpret)
        buffers = mosaic_attention(
            spec, q, kv_pages, page_indices, tiles, scratch, sm_scale=sm_scale, sinks=sinks,
            interpret=interpret,
        )  # fmt: skip
    return triton_attention(
        spec, q, kv_pages, page_indices, tiles, sm_scale=sm_scale, softcap=softcap, sinks=sinks,
        interpret=interpret, buffers=buffers,
    )  # fmt: skip


def tile_spec(
    *,
    num_tokens: int,
    max_num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
    backend: str = "auto",
    blocks: BlockSizes | None = None,
    kv_dtype: str | None = None,
    scratch_pages: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> TileSpec:
    """Return the static part of a bucket's metadata. Heads are those of one shard.

    The tile list depends on the `window`. `softcap` and `has_sinks` (whether there are sinks) only exclude
    back ends.

    With pages in 8 bits, `scratch_pages` is how many of them may be decoded for a step's long prompts before
    attention reads them, where the chosen back end has a kernel for that. They take memory during a layer.
    `build_tiles` then needs the page indices.

    Raises:
      AttentionArgumentError: no back end supports the arguments, or the selected one does not.
    """
    for field, value in (("num_tokens", num_tokens), ("max_num_seqs", max_num_seqs), ("head_dim", head_dim)):
        if value < 1:
            raise AttentionArgumentError(field, value, "must be at least 1")
    if scratch_pages < 0:
        raise AttentionArgumentError("scratch_pages", scratch_pages, "must be at least 0")
    heads = AttentionHeads(num_q_heads, num_kv_heads, head_dim, dtype, kv_dtype, window, softcap, has_sinks)
    if page_size not in PAGE_SIZES:
        raise AttentionArgumentError("page_size", page_size, f"must be one of {PAGE_SIZES}")
    if jnp.dtype(dtype).name not in DTYPES:
        raise AttentionArgumentError("dtype", jnp.dtype(dtype).name, f"must be one of {DTYPES}")
    return make_tile_spec(
        num_tokens=num_tokens,
        max_num_seqs=max_num_seqs,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        backend=choose_backend(backend, heads).name,
        blocks=blocks,
        kv_dtype=kv_dtype,
        scratch_pages=scratch_pages,
        window=window,
    )


def _check_sinks(sinks: jax.Array, num_q_heads: int) -> None:
    if sinks.shape != (num_q_heads,):
        raise AttentionArgumentError("sinks.shape", sinks.shape, f"must be ({num_q_heads},), a sink per head")
    if sinks.dtype != np.float32:
        raise AttentionArgumentError("sinks.dtype", sinks.dtype.name, "must be float32")


def _check_arrays(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    kv_dtype: str | None,
) -> None:
    if q.ndim != 3:
        raise AttentionArgumentError("q.shape", q.shape, "must be (num_tokens, num_q_heads, head_dim)")
    if kv_pages.ndim != 4 or kv_pages.shape[2] % 2 or kv_pages.shape[3] != q.shape[2]:
        limit = f"must be (num_pages, page_size, 2 * num_kv_heads, {q.shape[2]})"
        raise AttentionArgumentError("kv_pages.shape", kv_pages.shape, limit)
    if kv_pages.dtype != (expected := page_dtype(kv_dtype, q.dtype)):
        whose = "q's, " if kv_dtype is None else f"for kv_dtype {kv_dtype!r} "
        raise AttentionArgumentError("kv_pages.dtype", kv_pages.dtype.name, f"must be {whose}{expected.name}")
    rows = kv_lens.shape[0] if kv_lens.ndim == 1 else -1
    shapes = {
        "kv_lens": (kv_lens, ("max_num_seqs",), rows >= 1),
        "page_indices": (
            page_indices,
            (rows, "pages_per_seq of at least 1"),  # row 0's first page is read even if the row has no keys
            page_indices.shape[:-1] == (rows,) and page_indices.shape[-1] >= 1,
        ),
        "cu_q_lens": (cu_q_lens, (rows + 1,), cu_q_lens.shape == (rows + 1,)),
        "num_seqs": (num_seqs, (1,), num_seqs.shape == (1,)),
    }
    for name, (array, shape, right) in shapes.items():
        if not right:
            raise AttentionArgumentError(f"{name}.shape", array.shape, f"must be {shape}")
        if array.dtype != np.int32:
            raise AttentionArgumentError(f"{name}.dtype", array.dtype.name, "must be int32")
