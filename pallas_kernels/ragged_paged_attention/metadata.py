"""The tile list: a step's attention divided into pieces of bounded, similar size.

Owns: the flat i32 array of a step, and its builder. The same code runs on the host with numpy, or inside a
jit with jax.numpy. Does not know: what a kernel does with a tile.

`tile_lists` defines tiles and merges; `tile_specs` defines their layout in the array.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.scratch_lists import fill_scratch_lists
from pallas_kernels.ragged_paged_attention.tile_lists import build_lists
from pallas_kernels.ragged_paged_attention.tile_specs import HEADER_LEN, TileSpec


def build_tiles(
    spec: TileSpec,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    num_seqs: np.ndarray | int,
    out: np.ndarray | None = None,
    page_indices: np.ndarray | None = None,
) -> np.ndarray:
    """Build the tile list of one step on the host.

    Args:
      spec: the bucket's spec.
      cu_q_lens: i32[max_num_seqs + 1]; entries past num_seqs are ignored.
      kv_lens: i32[max_num_seqs].
      num_seqs: i32[1] or an int.
      out: i32[tiles_len] to overwrite; None allocates a new array.
      page_indices: i32[max_num_seqs, pages_per_seq]; required if the spec has a scratch pool.

    Returns:
      i32[tiles_len], `out` if given.

    Raises:
      AttentionArgumentError: the spec holds fewer rows or query tokens, `out` has another length, or page
        indices are missing.
    """
    num_rows = int(np.asarray(num_seqs).reshape(-1)[0])
    if out is None:
        out = np.zeros(spec.tiles_len, np.int32)
    elif out.shape != (spec.tiles_len,):
        raise AttentionArgumentError(
            "out.shape", out.shape, f"must be ({spec.tiles_len},), the spec's tiles_len"
        )
    if num_rows > spec.max_num_seqs:
        raise AttentionArgumentError("num_seqs", num_rows, f"the spec holds {spec.max_num_seqs} rows")
    if not spec.blocks.classes:
        return out
    used = int(cu_q_lens[num_rows]) if num_rows else 0
    if used > spec.num_tokens:
        raise AttentionArgumentError("cu_q_lens", used, f"the spec holds {spec.num_tokens} query tokens")
    rows = np.zeros((3, num_rows + 1), np.int32)
    rows[0] = cu_q_lens[: num_rows + 1]
    rows[1, :-1] = rows[0, 1:] - rows[0, :-1]
    rows[1, -1] = spec.num_tokens - used
    rows[2, :-1] = kv_lens[:num_rows]
    bases = None
    out[:HEADER_LEN] = 0
    if spec.scratch_pages:
        if page_indices is None:
            limit = f"must be given: the spec has a scratch pool of {spec.scratch_pages} pages"
            raise AttentionArgumentError("page_indices", None, limit)
        bases = fill_scratch_lists(spec, rows[1], rows[2], page_indices, out)
    counts, lists = build_lists(np, spec, rows[0], rows[1], rows[2], bases)
    out[: len(counts)] = counts
    for index, entries in enumerate(lists):
        offset = spec.tiles_offset(index)
        out[offset : offset + entries.size] = entries.ravel()
    return out


def build_tiles_traced(
    spec: TileSpec, cu_q_lens: jax.Array, kv_lens: jax.Array, num_seqs: jax.Array
) -> jax.Array:
    """Build i32[tiles_len] as `build_tiles` does, but inside a jit, for callers without a host plan.

    Raises AttentionArgumentError for a spec with a scratch pool: its pages are chosen on the host.
    """
    if spec.scratch_pages:
        limit = (
            "must be 0 for a list that is built on the device; use build_tiles, or a spec without the pool"
        )
        raise AttentionArgumentError("scratch_pages", spec.scratch_pages, limit)
    real = jnp.arange(spec.max_num_seqs) < num_seqs[0]
    used = cu_q_lens[num_seqs[0]]
    begins = jnp.append(jnp.where(real, cu_q_lens[:-1], 0), used)
    q_lens = jnp.append(jnp.where(real, cu_q_lens[1:] - cu_q_lens[:-1], 0), spec.num_tokens - used)
    lens = jnp.append(jnp.where(real, kv_lens, 0), 0)
    counts, lists = build_lists(jnp, spec, begins, q_lens, lens)
    header = jnp.zeros(HEADER_LEN, jnp.int32).at[: len(counts)].set(jnp.stack(counts))
    return jnp.concatenate([header, *(entries.astype(jnp.int32).ravel() for entries in lists)])
