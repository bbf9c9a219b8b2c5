"""Random ragged batches with NaN wherever nothing may look."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Batch(NamedTuple):
    q: Any
    kv_pages: Any
    kv_lens: np.ndarray
    page_indices: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray

    @property
    def num_used_tokens(self) -> int:
        return int(self.cu_q_lens[self.num_seqs[0]])


def make_batch(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: Any = "float32",
    padded_tokens: int = 0,
    padded_rows: int = 0,
    shared: tuple[tuple[int, int], ...] = (),
) -> Batch:
    """`rows` are (query length, keys); `shared` are (row, other): the row reads the other's page list.

    Every page that no row uses, every slot past the keys of the pages that rows do use, and every padded
    token holds NaN; padded rows hold page ids and lengths that would be wrong to follow.
    """
    max_pages = max([-(-kv // page_size) for _, kv in rows] + [1]) + 1
    num_rows = len(rows) + padded_rows
    num_pages = sum(-(-kv // page_size) for _, kv in rows) + 3
    ids = iter(rng.permutation(num_pages))
    kv_pages = np.full((num_pages, page_size, 2 * num_kv_heads, head_dim), np.nan, np.float32)
    page_indices = np.full((num_rows, max_pages), num_pages - 1, np.int32)
    owners = dict(shared)
    for row, (_, kv_len) in enumerate(rows):
        if row in owners:
            page_indices[row] = page_indices[owners[row]]
            continue
        for column in range(-(-kv_len // page_size)):
            page = int(next(ids))
            page_indices[row, column] = page
            count = min(page_size, kv_len - column * page_size)
            kv_pages[page, :count] = rng.standard_normal((count, 2 * num_kv_heads, head_dim))
    cu_q_lens = np.cumsum([0] + [q_len for q_len, _ in rows] + [7] * padded_rows).astype(np.int32)
    used = int(cu_q_lens[len(rows)])
    q = np.full((used + padded_tokens, num_q_heads, head_dim), np.nan, np.float32)
    q[:used] = rng.standard_normal((used, num_q_heads, head_dim))
    kv_lens = np.array([kv for _, kv in rows] + [9999] * padded_rows, np.int32)
    return Batch(
        jnp.asarray(q, dtype), jnp.asarray(kv_pages, dtype), kv_lens, page_indices, cu_q_lens,
        np.array([len(rows)], np.int32),
    )  # fmt: skip


def tolerance(dtype: Any) -> float:
    """Largest absolute difference from the float32 reference, for values of order one."""
    return {"float32": 5e-6, "float16": 4e-3, "bfloat16": 2.5e-2}[jnp.dtype(dtype).name]
