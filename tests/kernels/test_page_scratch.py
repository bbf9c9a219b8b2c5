"""Pages in 8 bits, decoded into a 16-bit pool, hold what attention reads from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import page_shape, write_kv
from pallas_kernels.ragged_paged_attention.page_formats import decode, split_pages
from pallas_kernels.ragged_paged_attention.pallas_triton_scratch import decode_pages


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_of_rows_are_decoded(kv_dtype: str) -> None:
    k = jax.random.normal(jax.random.key(0), (96, 2, 128))
    empty = jnp.zeros((4, *page_shape(kv_dtype, 32, 2, 128)), jnp.int8)
    pool = write_kv(empty, k, 2 * k, jnp.arange(32, 128), page_size=32, kv_dtype=kv_dtype)
    pages, kv_lens = jnp.asarray([[2, 1], [3, 0]], jnp.int32), jnp.asarray([64, 20], jnp.int32)
    found, indices = decode_pages(
        pool, kv_lens, pages, kv_dtype=kv_dtype, page_size=32, dtype=jnp.bfloat16, interpret=True
    )
    wanted = decode(split_pages(pool, 32), kv_dtype).astype(jnp.bfloat16)
    for row, column in ((0, 0), (0, 1), (1, 0)):
        own, source = found[indices[row, column]], wanted[pages[row, column]]
        np.testing.assert_array_equal(own.astype(jnp.float32), source.astype(jnp.float32))
