"""Keys that one row's causal attention reads, and its query-key pairs, with a window or without.

Owns: that arithmetic, for the simulator and for roofline bounds alike. Does not know: models or kernels.
"""

from __future__ import annotations


def reads_and_pairs(q_len: int, kv_len: int, window: int | None) -> tuple[int, int]:
    """Return the context tokens that a row of a layer reads, and its query-key pairs.

    Args:
      q_len: query tokens, the last of the context.
      kv_len: context tokens, the queries' own included.
      window: tokens that a query sees, its own included; None means all before it.
    """
    first = kv_len - q_len + 1  # keys that the first query would see without a window
    if window is None or kv_len <= window:
        return kv_len, q_len * (first + kv_len) // 2
    num_shorter = max(window - first, 0)
    num_pairs = num_shorter * (first + window - 1) // 2 + (q_len - num_shorter) * window
    return min(kv_len, q_len + window - 1), num_pairs
