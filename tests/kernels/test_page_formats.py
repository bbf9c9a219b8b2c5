"""Keys and values in 8 bits: codes, scales, their places in a page, and attention over such pages."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    build_tiles,
    ragged_paged_attention,
    tile_spec,
    write_kv,
    xla,
)
from pallas_kernels.ragged_paged_attention.page_formats import (
    PageKind,
    decode,
    encode,
    num_scale_rows,
    page_shape,
    split_pages,
    stored_as,
)
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import Room, assert_equals_reference, make_batch, random_rows, stored
from tests.kernels.cross_lower import lower_for_cuda

SCALE = 0.17
SMALL_BLOCKS = BlockSizes((TileClass(16, 32, 4, 2, 64, 8), TileClass(64, 16, 4, 2, 64, 8)))
ROWS = [(1, 70), (5, 33), (40, 40), (1, 1), (0, 12), (70, 80), (17, 200), (8, 8)]
PAGES = [  # head_dim, page_size
    *[(16, 32), (128, 32)],
    *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((32, 64), (64, 32), (128, 64), (80, 16))),
]
STEP = {
    "int8": 0.5 / 127,
    "float8_e4m3fn": 2.0**-4,
}  # relative to a row's largest magnitude: the largest step of codes


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 3e30])
def test_rows_come_back_within_half_a_step(kv_dtype, magnitude):
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((500, 64)) * rng.lognormal(size=(500, 1)) * magnitude).astype(np.float32)
    rows[3] = 0
    back = np.asarray(stored_as(jnp.asarray(rows), kv_dtype))
    largest = np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(back - rows) <= largest * (STEP[kv_dtype] * 1.01)).all()  # a scale has 8 bits, rounded up
    assert not back[3].any()
    assert (np.abs(back).max(axis=1) > 0.96 * largest[:, 0])[np.arange(500) != 3].all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_is_stored_independently(kv_dtype):
    """Its codes do not depend on other rows, so a recomputed row is stored as before."""
    rows = jnp.asarray(np.random.default_rng(1).standard_normal((40, 3, 32)), jnp.float32)
    whole = encode(rows, kv_dtype)
    for index in (0, 17, 39):
        alone = encode(rows[index : index + 1] * 1.0, kv_dtype)
        np.testing.assert_array_equal(alone.codes[0], whole.codes[index])
        np.testing.assert_array_equal(alone.scales[0], whole.scales[index])


def test_codes_are_the_formats():
    """Every e4m3 number except NaN is kept, as in ml_dtypes; ties of integers are rounded up."""
    bits = np.array([bits for bits in range(256) if bits & 0x7F != 0x7F], np.uint8)
    numbers = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = encode(jnp.asarray(numbers), "float8_e4m3fn")  # the largest is 448, so the scale is 1
    np.testing.assert_array_equal(np.asarray(found.codes).view(np.uint8), bits)
    np.testing.assert_array_equal(decode(found, "float8_e4m3fn"), numbers)
    assert encode(jnp.asarray([127.0, 0.5, 1.5, -2.5, -0.4]), "int8").codes.tolist() == [127, 1, 2, -2, 0]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nan_and_infinity_stay_non_finite(kv_dtype, bad):
    rows = jnp.ones((2, 16)).at[0, 5].set(bad)
    back = np.asarray(stored_as(rows, kv_dtype))
    assert not np.isfinite(back[0]).any() and np.isfinite(back[1]).all()


@pytest.mark.parametrize(
    ("backend", "kv_dtype"), [*(("xla", name) for name in KV_DTYPES), ("pallas_triton", "int8")]
)
@pytest.mark.parametrize(("head_dim", "page_size"), PAGES)
def test_a_written_token_is_where_its_slot_says(head_dim, page_size, backend, kv_dtype):
    rng = np.random.default_rng(page_size)
    num_pages, num_kv_heads, num_tokens = 6, 2, 40
    shape = page_shape(kv_dtype, page_size, num_kv_heads, head_dim)
    assert shape[0] - page_size == num_scale_rows(kv_dtype, page_size, head_dim) > 0
    before = rng.integers(-128, 128, (num_pages, *shape)).astype(np.int8)
    k, v = rng.standard_normal((2, num_tokens, num_kv_heads, head_dim)).astype(np.float32)
    slots = rng.permutation(num_pages * page_size)[:num_tokens].astype(np.int32)
    slots[0] = num_pages * page_size  # padding
    how = {"page_size": page_size, "kv_dtype": kv_dtype, "backend": backend, "interpret": True}
    write = jax.jit(functools.partial(write_kv, **how))
    after = np.asarray(write(before, k, v, slots))

    kept = np.ones(num_pages * page_size, bool)
    kept[slots[1:]] = False
    was, now = (split_pages(jnp.asarray(pages), page_size) for pages in (before, after))
    for one, other in zip(was, now, strict=True):
        flat, other_flat = (np.asarray(part).reshape(kept.size, -1) for part in (one, other))
        np.testing.assert_array_equal(flat[kept].view(np.uint8), other_flat[kept].view(np.uint8))
    rows = np.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    found = np.asarray(decode(now, kv_dtype)).reshape(kept.size, 2 * num_kv_heads, head_dim)
    np.testing.assert_array_equal(found[slots[1:]], stored_as(jnp.asarray(rows[1:]), kv_dtype))
    num_bytes = 2 * page_size  # bytes of scales; later bytes are unused
    rest = [pages[:, page_size:].swapaxes(1, 2).reshape(num_pages, shape[1], -1) for pages in (before, after)]
    np.testing.assert_array_equal(rest[0][..., num_bytes:], rest[1][..., num_bytes:])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_reference_reads_pages_as_they_are_written(kv_dtype):
    """It shares no code with the formats: stored pages and their decoded rows give the same result."""
    batch = make_batch(np.random.default_rng(2), ROWS, Heads(4, 2, 32), page_size=32)
    got = reference_attention(
        *map(np.asarray, stored(batch, kv_dtype)), sm_scale=SCALE, page_size=32, kv_dtype=kv_dtype
    )
    plain = batch._replace(kv_pages=stored_as(batch.kv_pages, kv_dtype))
    np.testing.assert_array_equal(got, reference_attention(*map(np.asarray, plain), sm_scale=SCALE))


def attend(batch: Any, backend: str, page_size: int, kv_dtype: Any, blocks: BlockSizes | None) -> jax.Array:
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pages.shape[2] // 2, head_dim=batch.q.shape[2], dtype=batch.q.dtype,
        page_size=page_size, backend=backend, blocks=blocks, kv_dtype=kv_dtype,
    )  # fmt: skip
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    return _compiled(spec)(batch, jnp.asarray(tiles))


@functools.cache
def _compiled(spec: Any) -> Any:
    def run(batch: Any, tiles: Any) -> jax.Array:
        return ragged_paged_attention(
            *batch, sm_scale=SCALE, metadata=(spec, tiles), kv_dtype=spec.kv_dtype, interpret=True
        )

    options = {"xla_backend_optimization_level": 0} if spec.backend == "pallas_triton" else None
    return jax.jit(run, compiler_options=options)


SHAPES = [
    (Heads(4, 4, 32), 16, "float32"),
    (Heads(8, 2, 64), 32, "bfloat16"),
    (Heads(8, 1, 32), 64, "float16"),
]


@pytest.mark.parametrize(
    ("backend", "heads", "page_size", "dtype", "kv_dtype"),
    [
        *[("xla", *SHAPES[i], KV_DTYPES[i % 2]) for i in range(3)],
        *[pytest.param("xla", *SHAPES[i], KV_DTYPES[1 - i % 2], marks=pytest.mark.long) for i in range(3)],
        *[
            pytest.param(
                "pallas_triton", *SHAPES[i], name, marks=() if (i, name) == (1, "int8") else pytest.mark.long
            )
            for i in range(3)
            for name in KV_DTYPES
        ],
    ],
    ids=str,
)
def test_back_ends_equal_the_reference(backend, heads, page_size, dtype, kv_dtype):
    batch = make_batch(np.random.default_rng(page_size), ROWS, heads, page_size=page_size, dtype=dtype)
    batch = stored(batch, kv_dtype)
    blocks = SMALL_BLOCKS if backend == "pallas_triton" else None
    out = attend(batch, backend, page_size, kv_dtype, blocks)
    assert_equals_reference(out, batch, SCALE, page_size=page_size, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_form_for_accelerators_equals_the_reference(kv_dtype):
    """This is the accelerator form of `xla`, on this platform; the test above covers the other form."""
    batch = stored(make_batch(np.random.default_rng(5), ROWS, Heads(4, 2, 32), page_size=32), kv_dtype)
    kind = PageKind(32, kv_dtype)
    out = jax.jit(lambda batch: xla.together(*batch, sm_scale=SCALE, kind=kind))(batch)
    assert_equals_reference(out, batch, SCALE, page_size=32, kv_dtype=kv_dtype)


@pytest.mark.parametrize("magnitude", [1e-3, 1e-5])
def test_small_values_keep_their_digits_in_float16(magnitude):
    """Float16 has too little range for weights times scales, so the values are scaled."""
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [(1, 60), (4, 33)], Heads(4, 2, 32), page_size=16, dtype="float16")
    pages = batch.kv_pages.at[:, :, 1::2].multiply(magnitude)
    batch = stored(batch._replace(kv_pages=pages), "int8")
    out = np.asarray(attend(batch, "pallas_triton", 16, "int8", SMALL_BLOCKS), np.float32)
    expected = reference_attention(*map(np.asarray, batch), sm_scale=SCALE, page_size=16, kv_dtype="int8")
    assert np.abs(out - expected)[:5].max() < 4e-3 * np.abs(expected[:5]).max()


@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
def test_random_batches(backend):
    room = Room(num_tokens=96, max_num_seqs=9, pages_per_seq=14, num_pages=50)
    for seed in range(15):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        rows = random_rows(rng, room, 16, 90)
        batch = stored(make_batch(rng, rows, Heads(4, 2, 32), room=room), "int8")
        out = attend(batch, backend, 16, "int8", SMALL_BLOCKS if backend == "pallas_triton" else None)
        assert_equals_reference(out, batch, SCALE, page_size=16, kv_dtype="int8")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "dtype"), [(Heads(40, 10, 128), "bfloat16"), (Heads(12, 12, 64), "float32")]
)
def test_lowers_for_cuda(heads, dtype, kv_dtype):
    num_tokens, max_num_seqs = 256, 64
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=32, dtype=dtype,
        backend="pallas_triton", kv_dtype=kv_dtype,
    )  # fmt: skip

    def run(*args: jax.Array) -> jax.Array:
        return ragged_paged_attention(*args[:-1], sm_scale=0.1, metadata=(spec, args[-1]), kv_dtype=kv_dtype)

    shape = jax.ShapeDtypeStruct
    pool = shape((4000, *page_shape(kv_dtype, 32, heads.num_kv_heads, heads.head_dim)), jnp.int8)
    q = shape((num_tokens, heads.num_q_heads, heads.head_dim), dtype)
    sizes = ((max_num_seqs,), (max_num_seqs, 128), (max_num_seqs + 1,), (1,), (spec.tiles_len,))
    rows = [shape(size, jnp.int32) for size in sizes]
    assert lower_for_cuda(run, q, pool, *rows).count("xla.gpu.triton") >= 2


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_write_allocates_no_second_pool(kv_dtype):
    """It is in place, and its indices are in order, since XLA for GPUs may otherwise transpose the pool."""
    pool = jax.ShapeDtypeStruct((4000, *page_shape(kv_dtype, 32, 10, 128)), jnp.int8)
    new, slots = jax.ShapeDtypeStruct((64, 10, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    write = functools.partial(write_kv, page_size=32, kv_dtype=kv_dtype)
    lowered = jax.jit(write, donate_argnums=0).lower(pool, new, new, slots)
    found = re.findall(r"scatter_dims_to_operand_dims = \[([^]]*)\]", lowered.as_text())
    assert found and all(dims == ", ".join(map(str, range(len(dims.split(", "))))) for dims in found)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == np.prod(pool.shape)
    assert memory.temp_size_in_bytes < np.prod(pool.shape) // 10


def test_the_write_lowers_for_cuda():
    new, slots = jax.ShapeDtypeStruct((64, 10, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    pool = jax.ShapeDtypeStruct((4000, *page_shape("int8", 32, 10, 128)), jnp.int8)
    how = {"page_size": 32, "kv_dtype": "int8", "backend": "pallas_triton"}
    assert (
        lower_for_cuda(functools.partial(write_kv, **how), pool, new, new, slots).count("xla.gpu.triton") == 1
    )


def test_what_does_not_fit_is_named():
    batch = stored(make_batch(np.random.default_rng(0), ROWS[:2], Heads(4, 2, 32)), "int8")
    with pytest.raises(AttentionArgumentError, match=r"kv_pages.dtype = 'int8': must be q's, float32"):
        ragged_paged_attention(*batch, sm_scale=1.0)
    with pytest.raises(AttentionArgumentError, match=r"page_size = 15: rows of a page must be one of"):
        ragged_paged_attention(
            *batch._replace(kv_pages=batch.kv_pages[:, :15]), sm_scale=1.0, kv_dtype="int8"
        )
    with pytest.raises(AttentionArgumentError, match="kv_dtype = 'int4'"):
        ragged_paged_attention(*batch, sm_scale=1.0, kv_dtype="int4")
    sizes = {"num_tokens": 64, "max_num_seqs": 64, "num_q_heads": 32, "num_kv_heads": 32, "page_size": 32}
    for dtype, head_dim, reason in (
        ("bfloat16", 64, "head_dim = 64: for pages of int8 pallas_mosaic_gpu supports"),
        ("float16", 128, "dtype = 'float16': for pages of int8 pallas_mosaic_gpu supports"),
    ):
        with pytest.raises(AttentionArgumentError, match=reason):
            tile_spec(**sizes, head_dim=head_dim, dtype=dtype, backend="pallas_mosaic_gpu", kv_dtype="int8")
    new = jnp.zeros((1, 2, 32))
    with pytest.raises(AttentionArgumentError, match=r"kv_pages.shape = .*pages of 16 tokens"):
        write_kv(batch.kv_pages, new, new, jnp.zeros(1, jnp.int32), page_size=16)
