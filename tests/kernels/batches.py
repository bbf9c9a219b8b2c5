"""Random ragged batches with NaN wherever a kernel must not read."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.page_formats import encode, page_shape, scale_bytes
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import Heads


class Batch(NamedTuple):
    """Arguments of `ragged_paged_attention`, in order."""

    q: Any
    kv_pages: Any
    kv_lens: np.ndarray
    page_indices: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray


class Room(NamedTuple):
    """Padded shapes; batches of one room share a compiled executable."""

    num_tokens: int
    max_num_seqs: int
    pages_per_seq: int
    num_pages: int


def room_for(rows: list[tuple[int, int]], page_size: int) -> Room:
    """Return a room with a few more tokens, rows and pages than `rows` need."""
    pages = [-(-kv_len // page_size) for _, kv_len in rows]
    return Room(sum(q_len for q_len, _ in rows) + 5, len(rows) + 2, max(pages, default=0) + 1, sum(pages) + 3)


def make_batch(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    heads: Heads,
    *,
    page_size: int = 16,
    dtype: Any = "float32",
    room: Room | None = None,
    shared: dict[int, int] | None = None,
) -> Batch:
    """Make a batch of rows (query length, keys); `shared` maps a row to an earlier row with the same pages.

    Unused pages, slots past the keys of used pages, and padded tokens hold NaN. Padded rows hold page ids and
    lengths that a kernel must not follow.
    """
    room = room or room_for(rows, page_size)
    counts = [0 if row in (shared or {}) else -(-kv_len // page_size) for row, (_, kv_len) in enumerate(rows)]
    ids = rng.permutation(room.num_pages)[: sum(counts)].astype(np.int32)
    num_combined = 2 * heads.num_kv_heads
    kv_pages = np.full((room.num_pages, page_size, num_combined, heads.head_dim), np.nan, np.float32)
    page_indices = np.full((room.max_num_seqs, room.pages_per_seq), room.num_pages - 1, np.int32)
    used = 0
    for row, (_, kv_len) in enumerate(rows):
        if shared and row in shared:
            page_indices[row] = page_indices[shared[row]]
            continue
        pages = ids[used : used + counts[row]]
        used += counts[row]
        page_indices[row, : len(pages)] = pages
        flat = np.full((len(pages) * page_size, num_combined, heads.head_dim), np.nan, np.float32)
        flat[:kv_len] = rng.standard_normal((kv_len, num_combined, heads.head_dim))
        kv_pages[pages] = flat.reshape(len(pages), page_size, num_combined, heads.head_dim)
    cu_q_lens = np.full(room.max_num_seqs + 1, room.num_tokens + 7, np.int32)
    cu_q_lens[: len(rows) + 1] = np.cumsum([0] + [q_len for q_len, _ in rows])
    q = np.full((room.num_tokens, heads.num_q_heads, heads.head_dim), np.nan, np.float32)
    num_used = cu_q_lens[len(rows)]
    q[:num_used] = rng.standard_normal((num_used, heads.num_q_heads, heads.head_dim))
    kv_lens = np.full(room.max_num_seqs, 99999, np.int32)
    kv_lens[: len(rows)] = [kv_len for _, kv_len in rows]
    num_seqs = np.array([len(rows)], np.int32)
    return Batch(
        jnp.asarray(q, dtype), jnp.asarray(kv_pages, dtype), kv_lens, page_indices, cu_q_lens, num_seqs
    )


def random_rows(
    rng: np.random.Generator, room: Room, page_size: int, max_q_len: int
) -> list[tuple[int, int]]:
    """Draw rows that fit a room: decodes, short and long query ranges, with and without earlier keys."""
    rows: list[tuple[int, int]] = []
    tokens, pages = room.num_tokens, room.num_pages - 1
    while len(rows) < room.max_num_seqs and tokens and pages and rng.random() > 0.05:
        most_keys = min(room.pages_per_seq, pages) * page_size
        most = min(int(rng.choice([1, 8, 40, max_q_len])), tokens, most_keys)
        q_len = int(rng.integers(0, most + 1))
        kv_len = q_len + int(rng.choice([0, rng.integers(0, most_keys - q_len + 1)]))
        rows.append((q_len, kv_len))
        tokens, pages = tokens - q_len, pages - -(-kv_len // page_size)
    return rows


def stored(batch: Batch, kv_dtype: str | None) -> Batch:
    """Return the batch with pages in 8 bits; rows that held NaN have a scale of NaN."""
    if kv_dtype is None:
        return batch
    pages = np.asarray(batch.kv_pages)
    num_pages, page_size, num_combined, head_dim = pages.shape
    codes, high, low = map(np.asarray, _encoded(batch.kv_pages, kv_dtype))
    shape = page_shape(kv_dtype, page_size, num_combined // 2, head_dim)
    found = np.full((num_pages, *shape), -1, np.int8)
    found[:, :page_size] = codes
    planes = np.concatenate([high.transpose(0, 2, 1), low.transpose(0, 2, 1)], axis=2)
    num_rows = shape[0] - page_size
    flat = np.full((num_pages, num_combined, num_rows * head_dim), -1, np.int8)
    flat[:, :, : planes.shape[2]] = planes
    rest = flat.reshape(num_pages, num_combined, num_rows, head_dim)
    found[:, page_size:] = rest.transpose(0, 2, 1, 3)
    return batch._replace(kv_pages=jnp.asarray(found))


@functools.partial(jax.jit, static_argnums=1)
def _encoded(pages: jax.Array, kv_dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return codes and both bytes of scales, [pages, tokens, heads], by one program instead of twenty."""
    codes, scales = encode(pages, kv_dtype)
    return codes, *scale_bytes(scales)


def hide_pages(batch: Batch, window: int, *, page_size: int = 16, dummy: int | None = None) -> Batch:
    """Return a batch whose pages before all windows of a row hold NaN; `dummy` replaces their indices.

    The dummy page must hold NaN. Rows must not share pages that one of them sees.
    """
    pages, indices = np.array(batch.kv_pages), batch.page_indices.copy()
    nothing = np.nan if pages.dtype != np.int8 else -1  # as scales, -1 is NaN too
    for row in range(int(batch.num_seqs[0])):
        q_len = int(batch.cu_q_lens[row + 1] - batch.cu_q_lens[row])
        first_key = int(batch.kv_lens[row]) - max(q_len, 1) + 1 - window
        num_hidden = max(first_key, 0) // page_size
        pages[indices[row, :num_hidden]] = nothing
        if dummy is not None:
            indices[row, :num_hidden] = dummy
    return batch._replace(kv_pages=jnp.asarray(pages), page_indices=indices)


def hide_keys(batch: Batch, window: int) -> Batch:
    """Return a batch in which all keys and values before all windows of a row are NaN."""
    pages = np.array(batch.kv_pages)
    page_size = pages.shape[1]
    for row in range(int(batch.num_seqs[0])):
        q_len = int(batch.cu_q_lens[row + 1] - batch.cu_q_lens[row])
        keys = np.arange(max(int(batch.kv_lens[row]) - max(q_len, 1) + 1 - window, 0))
        pages[batch.page_indices[row, keys // page_size], keys % page_size] = np.nan
    return batch._replace(kv_pages=jnp.asarray(pages))


def tolerance(dtype: Any) -> float:
    """Return the largest difference from the float32 reference, absolute for small values, else relative."""
    return {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}[jnp.dtype(dtype).name]


def assert_equals_reference(
    out: Any,
    batch: Batch,
    sm_scale: float,
    *,
    page_size: int | None = None,
    kv_dtype: str | None = None,
    **options: Any,
) -> None:
    """Check that `out` equals the reference within the dtype's tolerance, and is exactly 0 without a row.

    `options` are `window`, `softcap` and `sinks`, as those of the reference.
    """
    arrays = map(np.asarray, batch)
    expected = reference_attention(
        *arrays, sm_scale=sm_scale, page_size=page_size, kv_dtype=kv_dtype, **options
    )
    assert out.dtype == batch.q.dtype
    got = np.asarray(out).astype(np.float32)
    used = int(batch.cu_q_lens[batch.num_seqs[0]])
    assert not got[used:].any()
    limit = tolerance(batch.q.dtype)
    np.testing.assert_allclose(got, expected, rtol=limit, atol=limit)
