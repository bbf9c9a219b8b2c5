"""The meaning of ragged paged attention, written as plainly as possible.

Owns: the definition that every back end is tested against. Dense, float32, one row and one head at a time,
numpy only; it shares no code with the rest of the package and is itself tested against
`jax.nn.dot_product_attention`. Does not know: tiles, or what is fast.
Called by: tests, the benchmark's correctness check, `backend="reference"`.
"""

from __future__ import annotations

import numpy as np


def reference_attention(
    q: np.ndarray,
    kv_pages: np.ndarray,
    kv_lens: np.ndarray,
    page_indices: np.ndarray,
    cu_q_lens: np.ndarray,
    num_seqs: np.ndarray,
    *,
    sm_scale: float,
) -> np.ndarray:
    """Causal attention of every row's last queries over the row's pages.

    Args:
      q: [num_tokens, num_q_heads, head_dim].
      kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim]; K at even, V at odd heads.
      kv_lens: i32[max_num_seqs], keys of a row, its queries included.
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1], where each row's queries begin and end.
      num_seqs: i32[1]; rows from there on are padding.
      sm_scale: factor on the scores.

    Returns:
      f32[num_tokens, num_q_heads, head_dim]; zero for tokens that belong to no row.
    """
    num_q_heads = q.shape[1]
    page_size, num_kv_heads = kv_pages.shape[1], kv_pages.shape[2] // 2
    group = num_q_heads // num_kv_heads
    out = np.zeros(q.shape, np.float32)
    for row in range(int(num_seqs[0])):
        start, stop, kv_len = int(cu_q_lens[row]), int(cu_q_lens[row + 1]), int(kv_lens[row])
        if start == stop:
            continue
        pages = np.asarray(page_indices[row, : -(-kv_len // page_size)])
        kv = np.asarray(kv_pages[pages]).reshape(-1, 2 * num_kv_heads, q.shape[2])[:kv_len].astype(np.float32)
        q_positions = np.arange(kv_len - (stop - start), kv_len)
        visible = np.arange(kv_len)[None, :] <= q_positions[:, None]
        for head in range(num_q_heads):
            k, v = kv[:, 2 * (head // group)], kv[:, 2 * (head // group) + 1]
            scores = np.asarray(q[start:stop, head]).astype(np.float32) @ k.T * np.float32(sm_scale)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[start:stop, head] = (weights / weights.sum(axis=1, keepdims=True)) @ v
    return out
