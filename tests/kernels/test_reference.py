"""The reference itself, against JAX's dense attention."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import make_batch

DENSE = jax.jit(functools.partial(jax.nn.dot_product_attention, scale=0.3, is_causal=True))


@pytest.mark.parametrize("heads", [Heads(4, 4, 16), Heads(6, 2, 32), Heads(8, 1, 16)], ids=str)
def test_equals_dot_product_attention(heads: Heads) -> None:
    rows = [(1, 40), (7, 7), (12, 40)]
    batch = make_batch(np.random.default_rng(heads.num_q_heads), rows, heads)
    out = reference_attention(*map(np.asarray, batch), sm_scale=0.3)
    for row, (q_len, kv_len) in enumerate(rows):
        pages = batch.page_indices[row, : -(-kv_len // 16)]
        kv = np.asarray(batch.kv_pages)[pages].reshape(-1, 2 * heads.num_kv_heads, heads.head_dim)[:kv_len]
        start = int(batch.cu_q_lens[row])
        q = np.asarray(batch.q)[start : start + q_len]
        # Leading queries make the ranges equal, so that JAX's own causal mask applies.
        padded = np.concatenate([np.zeros((kv_len - q_len, *q.shape[1:]), np.float32), q])
        with jax.default_matmul_precision("highest"):
            expected = DENSE(padded, kv[:, 0::2], kv[:, 1::2])
        np.testing.assert_allclose(out[start : start + q_len], expected[-q_len:], atol=2e-6, rtol=0)
    assert not out[int(batch.cu_q_lens[3]) :].any()
