"""Reference implementation of ragged paged attention, as plain as possible.

Owns: the definition against which every back end is tested. It is dense, in float32, for one row and one head
at a time, with numpy only. It shares no code with the rest of the package, and is itself tested against
`jax.nn.dot_product_attention`. Does not know: tiles, or speed. Called by: `api`, and tests.
"""

from __future__ import annotations

import ml_dtypes
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
    page_size: int | None = None,
    kv_dtype: str | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return the causal attention of every row's last queries over the row's pages.

    Args:
      q: [num_tokens, num_q_heads, head_dim].
      kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim]; K at even, V at odd heads.
      kv_lens: i32[max_num_seqs], keys of each row, including those of its queries.
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1], where each row's queries begin and end.
      num_seqs: i32[1]; rows from this index on are padding.
      sm_scale: factor on the scores.
      page_size: tokens of a page; None means that every row of a page is a token.
      kv_dtype: the pages' 8-bit format, with scales in their last rows; None means plain numbers.
      window: keys that a query sees, its own the last of them; None means all up to its own.
      softcap: bound of the scores' magnitude, softcap * tanh(score / softcap); None means no bound.
      sinks: f32[num_q_heads], a logit of each head that has a weight and no value; None means none.

    Returns:
      f32[num_tokens, num_q_heads, head_dim]; zero for tokens that belong to no row.
    """
    num_q_heads = q.shape[1]
    page_size = page_size or kv_pages.shape[1]
    num_kv_heads = kv_pages.shape[2] // 2
    group = num_q_heads // num_kv_heads
    out = np.zeros(q.shape, np.float32)
    for row in range(int(num_seqs[0])):
        start, stop, kv_len = int(cu_q_lens[row]), int(cu_q_lens[row + 1]), int(kv_lens[row])
        if start == stop:
            continue
        pages = np.asarray(page_indices[row, : -(-kv_len // page_size)])
        kv = _numbers(np.asarray(kv_pages[pages]), page_size, kv_dtype)
        kv = kv.reshape(-1, 2 * num_kv_heads, q.shape[2])[:kv_len]
        q_positions = np.arange(kv_len - (stop - start), kv_len)
        keys = np.arange(kv_len)[None, :]
        visible = keys <= q_positions[:, None]
        if window is not None:
            visible &= keys > q_positions[:, None] - window
            kv[~visible.any(axis=0)] = 0  # zero times an arbitrary number is not always zero
        for head in range(num_q_heads):
            k, v = kv[:, 2 * (head // group)], kv[:, 2 * (head // group) + 1]
            scores = np.asarray(q[start:stop, head]).astype(np.float32) @ k.T * np.float32(sm_scale)
            if softcap is not None:
                scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
            scores = np.where(visible, scores, -np.inf)
            largest = scores.max(axis=1, keepdims=True)
            if sinks is not None:
                largest = np.maximum(largest, sinks[head])
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(sinks[head] - largest)
            out[start:stop, head] = (weights / total) @ v
    return out


def _numbers(pages: np.ndarray, page_size: int, kv_dtype: str | None) -> np.ndarray:
    """Return the numbers that pages hold, f32[num_pages, page_size, 2 * num_kv_heads, head_dim]."""
    if kv_dtype is None:
        return pages.astype(np.float32)
    codes = pages[:, :page_size]
    if kv_dtype != "int8":
        codes = codes.view(np.dtype(getattr(ml_dtypes, kv_dtype)))
    numbers = codes.astype(np.float32)
    for page, head in np.ndindex(pages.shape[0], pages.shape[2]):
        stored = pages[page, page_size:, head].tobytes()
        high, low = stored[:page_size], stored[page_size : 2 * page_size]
        both = bytes(byte for pair in zip(low, high, strict=True) for byte in pair)  # little-endian
        scales = np.frombuffer(both, ml_dtypes.bfloat16).astype(np.float32)
        with np.errstate(invalid="ignore"):  # unwritten slots hold arbitrary bytes
            numbers[page, :, head] *= scales[:, None]
    return numbers
