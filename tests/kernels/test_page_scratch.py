"""Pages in 8 bits, decoded into a 16-bit pool, hold what attention reads from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import build_tiles, page_shape, tile_spec, write_kv
from pallas_kernels.ragged_paged_attention import pallas_triton_scratch as scratch
from pallas_kernels.ragged_paged_attention.page_formats import decode, split_pages
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_DECODED


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("num_programs", [2, 2640], ids=["loop", "one_each"])
def test_pages_of_rows_are_decoded(kv_dtype: str, num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts share a page; a row of one token reads pages in 8 bits."""
    monkeypatch.setattr(scratch, "_NUM_PROGRAMS", num_programs)
    k = jax.random.normal(jax.random.key(0), (320, 1, 128))
    empty = jnp.zeros((12, *page_shape(kv_dtype, 32, 1, 128)), jnp.int8)
    pool = write_kv(empty, k, 2 * k, jnp.arange(32, 352), page_size=32, kv_dtype=kv_dtype)
    spec = tile_spec(
        num_tokens=300, max_num_seqs=3, num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=32,
        dtype="bfloat16", backend="pallas_mosaic_gpu", kv_dtype=kv_dtype, scratch_pages=9,
    )  # fmt: skip
    pages = np.array([[7, 2, 5, 9, 0], [3, 3, 3, 3, 3], [7, 1, 10, 4, 6]], np.int32)
    cu_q_lens, kv_lens = np.array([0, 120, 121, 280], np.int32), np.array([128, 140, 160], np.int32)
    tiles = build_tiles(spec, cu_q_lens, kv_lens, 3, None, pages)
    assert tiles[NUM_DECODED] == 8
    found = scratch.decode_pages(spec, pool, jnp.asarray(tiles), dtype=jnp.bfloat16, interpret=True)
    wanted = decode(split_pages(pool, 32), kv_dtype).astype(jnp.bfloat16)
    decoded = tiles[spec.decoded_offset :][:8]
    assert sorted(decoded.tolist()) == [1, 2, 4, 5, 6, 7, 9, 10]
    np.testing.assert_array_equal(found[:8].astype(jnp.float32), wanted[decoded].astype(jnp.float32))
