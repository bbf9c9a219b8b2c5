"""The scatter into the pool against numpy assignment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import AttentionArgumentError, write_kv


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_equals_numpy(page_size: int, dtype: str) -> None:
    rng = np.random.default_rng(page_size)
    num_pages, num_kv_heads, head_dim, num_tokens = 7, 3, 8, 40
    pool = jnp.asarray(rng.standard_normal((num_pages, page_size, 2 * num_kv_heads, head_dim)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((num_tokens, num_kv_heads, head_dim)), dtype) for _ in range(2))
    end = num_pages * page_size
    slots = rng.permutation(end)[:num_tokens].astype(np.int32)
    slots[5:9] = [end, end, end + 3, 2**31 - 1]  # padding, twice the same
    expected = np.array(pool).reshape(end, 2 * num_kv_heads, head_dim)
    for token, slot in enumerate(slots):
        if slot < end:
            expected[slot, 0::2], expected[slot, 1::2] = np.asarray(k[token]), np.asarray(v[token])
    got = jax.jit(write_kv)(pool, k, v, slots)
    np.testing.assert_array_equal(np.asarray(got).reshape(expected.shape), expected)


def test_donated_pool_is_updated_in_place() -> None:
    shape = jax.ShapeDtypeStruct
    new = shape((16, 2, 8), jnp.float32)
    args = (shape((64, 16, 4, 8), jnp.float32), new, new, shape((16,), jnp.int32))
    memory = jax.jit(write_kv, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 64 * 16 * 4 * 8 * 4
    assert memory.temp_size_in_bytes < 64 * 16 * 4 * 8 * 4 // 2


def test_errors_name_rows_of_wrong_shape() -> None:
    pool, slots = jnp.zeros((2, 16, 4, 8)), jnp.zeros(3, jnp.int32)
    with pytest.raises(AttentionArgumentError, match=r"v\.shape = \(3, 4, 8\): must be \(3, 2, 8\)"):
        write_kv(pool, jnp.zeros((3, 2, 8)), jnp.zeros((3, 4, 8)), slots)
