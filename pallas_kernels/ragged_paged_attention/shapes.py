"""Named attention cases, shared by the tests and the benchmark.

Owns: the cases, and the drawing of a batch. Does not know: any back end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Heads:
    """Heads of a model's attention: query heads, KV heads, elements per head."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """One named batch: rows of (query length, total context), and the window, None for all keys."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: Heads
    page_size: int = 32
    window: int | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(q_len for q_len, _ in self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that must be read at least once, with 16 bits per element."""
        window = self.window or max(kv_len for _, kv_len in self.rows)
        num_keys = sum(min(kv_len, window + q_len - 1) for q_len, kv_len in self.rows)
        return num_keys * 2 * self.heads.num_kv_heads * self.heads.head_dim * 2

    @property
    def flops(self) -> int:
        """Floating-point operations (two per multiply-add) of all visible scores and values."""
        window = self.window or max(kv_len for _, kv_len in self.rows)
        pairs = 0
        for q_len, kv_len in self.rows:
            # Queries see one more key each, until the window is full.
            num_growing = min(max(window - (kv_len - q_len), 0), q_len)
            pairs += num_growing * (kv_len - q_len) + num_growing * (num_growing + 1) // 2
            pairs += (q_len - num_growing) * window
        return 4 * pairs * self.heads.num_q_heads * self.heads.head_dim


MHA40, GQA10, GQA8 = Heads(40, 40, 128), Heads(40, 10, 128), Heads(64, 8, 128)
SEVEN = Heads(28, 4, 128)  # seven query heads on a KV head


def _uniform(name: str, batch: int, q_len: int, kv_len: int, heads: Heads) -> Case:
    return Case(name, ((q_len, kv_len),) * batch, heads)


def _mixed() -> Case:
    """Return a case of decodes with evenly spread contexts and prompts that continue a conversation."""
    decodes = tuple((1, int(kv_len)) for kv_len in np.linspace(256, 4096, 124).astype(int))
    return Case("mixed_124x1_4x512_gqa10", decodes + ((512, 2560),) * 4, GQA10)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _uniform("decode_64x4096_gqa10", 64, 1, 4096, GQA10),
        _uniform("decode_128x1024_gqa10", 128, 1, 1024, GQA10),
        _uniform("decode_1x1024_gqa10", 1, 1, 1024, GQA10),
        _uniform("decode_32x1024_gqa10", 32, 1, 1024, GQA10),
        _uniform("decode_180x1024_gqa10", 180, 1, 1024, GQA10),
        _uniform("decode_32x4096_mha40", 32, 1, 4096, MHA40),
        _uniform("decode_128x4096_gqa8", 128, 1, 4096, GQA8),
        _uniform("decode_1x4096_gqa10", 1, 1, 4096, GQA10),
        _uniform("decode_1x16384_gqa8", 1, 1, 16384, GQA8),
        _uniform("decode_4x16384_gqa10", 4, 1, 16384, GQA10),
        _uniform("decode_7x20000_gqa10", 7, 1, 20000, GQA10),
        _uniform("decode_200x1024_seven", 200, 1, 1024, SEVEN),
        _uniform("multi_32x8x1024_mha40", 32, 8, 1024, MHA40),
        _uniform("multi_32x8x4096_mha40", 32, 8, 4096, MHA40),
        _uniform("multi_32x8x16384_mha40", 32, 8, 16384, MHA40),
        _uniform("multi_32x8x4096_gqa10", 32, 8, 4096, GQA10),
        _uniform("prefill_4x2048_gqa10", 4, 2048, 2048, GQA10),
        _uniform("prefill_4x2048_mha40", 4, 2048, 2048, MHA40),
        _uniform("prefill_1x8192_gqa10", 1, 8192, 8192, GQA10),
        _uniform("prefill_4x512of2560_gqa10", 4, 512, 2560, GQA10),
        _uniform("prefill_1x2048_gqa10", 1, 2048, 2048, GQA10),
        _uniform("prefill_1x512of8512_gqa10", 1, 512, 8512, GQA10),
        _uniform("prefill_5x150of7150_gqa10", 5, 150, 7150, GQA10),
        _uniform("prefill_5x150of7150_mha40", 5, 150, 7150, MHA40),
        _uniform("prefill_1x2048_seven", 1, 2048, 2048, SEVEN),
        _mixed(),
        Case("tiny", ((1, 70), (5, 33), (40, 40), (1, 1)), Heads(4, 2, 32)),
    )
}


def draw_metadata(
    case: Case, rng: np.random.Generator, *, num_pages: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Draw random pages for every row of a case.

    Returns:
      kv_lens i32[num_rows], page_indices i32[num_rows, pages_per_row], cu_q_lens i32[num_rows + 1],
      num_seqs i32[1], and the number of pages the pool must have.
    """
    kv_lens = np.array([kv_len for _, kv_len in case.rows], np.int32)
    cu_q_lens = np.cumsum([0] + [q_len for q_len, _ in case.rows]).astype(np.int32)
    counts = -(-kv_lens // case.page_size)
    pool = num_pages or int(counts.sum()) + 1
    ids = rng.permutation(np.arange(1, pool, dtype=np.int32))[: counts.sum()]
    page_indices = np.zeros((len(counts), int(counts.max())), np.int32)
    page_indices[np.arange(counts.max())[None, :] < counts[:, None]] = ids
    return kv_lens, page_indices, cu_q_lens, np.array([len(counts)], np.int32), pool
