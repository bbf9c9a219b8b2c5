"""Copies of pages between pools and chunks, both back ends, against numpy."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_copies import PageCopyError, choose_backend, gather_pages, scatter_pages
from tests.kernels.cross_lower import lower_for_cuda

NUM_PAGES, NUM_LAYERS = 9, 3
SHAPE = jax.ShapeDtypeStruct
# With the compiler options of `make test`, XLA copies bfloat16 through float32. A NaN stays a NaN with other
# bits, and a thread that flushes subnormal numbers turns them into zeros.
OLDER_EMITTERS = "xla_cpu_disable_new_fusion_emitters" in os.environ.get("XLA_FLAGS", "")
# (rows of a page, combined heads, head_dim, dtype); that of 256 has one chunk per launch
SIZES = [
    *[(16, 4, 64, "float32"), (32, 2, 32, "bfloat16"), (64, 2, 128, "float16"), (64, 2, 256, "float32")],
    *[(33, 4, 64, "int8"), (36, 2, 16, "int8")],  # rows of scales behind those of the tokens
]
BACKENDS = ["xla", "pallas_triton"]
# Half of the sizes each way; the other half in the long tests.
GATHERED, SCATTERED = (
    [
        pytest.param(size, backend, marks=pytest.mark.long if (i + j + which) % 2 else ())
        for i, size in enumerate(SIZES)
        for j, backend in enumerate(BACKENDS)
    ]
    for which in range(2)
)


def random_pools(page_size, num_heads, head_dim, dtype, num_pages=NUM_PAGES):
    """Draw arbitrary bits: NaN and infinities must be copied as well."""
    rng = np.random.default_rng(page_size + head_dim)
    dtype = jnp.dtype(dtype)
    shape = (NUM_LAYERS, num_pages, page_size, num_heads, head_dim)
    integers = rng.integers(0, 256, (*shape[:-1], head_dim * dtype.itemsize), np.uint8)
    return integers.view(dtype)


def bits(array):
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def check_bits(got, expected, backend):
    found = np.array(got)
    if OLDER_EMITTERS and backend == "xla" and expected.dtype == jnp.bfloat16:
        with np.errstate(invalid="ignore"):  # signaling NaN
            nans = np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(found), nans)
            flushed = (found == 0) & (np.abs(expected) < jnp.finfo(expected.dtype).smallest_normal)
        found[nans] = expected[nans]
        found[flushed] = expected[flushed]
    np.testing.assert_array_equal(bits(found), bits(expected))


def run_gather(pools, pages, backend, interpret):
    call = functools.partial(gather_pages, backend=backend, interpret=interpret)
    return jax.jit(call)([jnp.asarray(pool) for pool in pools], np.asarray(pages, np.int32))


def run_scatter(pools, chunks, pages, backend, interpret):
    call = functools.partial(scatter_pages, backend=backend, interpret=interpret)
    return jax.jit(call, donate_argnums=0)(
        [jnp.array(pool) for pool in pools],
        [jnp.asarray(chunk) for chunk in chunks],
        np.asarray(pages, np.int32),
    )


def check_gather(pools, backend, interpret):
    pages = [4, 8, 1, 1, 0]
    chunks = run_gather(pools, pages, backend, interpret)
    assert len(chunks) == len(pages)
    for chunk, page in zip(chunks, pages, strict=True):
        check_bits(chunk, pools[:, page], backend)


def check_scatter(pools, backend, interpret):
    """Check a scatter whose padding (page 0 twice, pages past the pool) changes nothing."""
    pages = [7, 0, 2, NUM_PAGES, 5, 0, 2**31 - 1]
    rng = np.random.default_rng(1)
    chunks = [pools[:, rng.integers(NUM_PAGES)][::-1] for _ in pages]
    expected = pools.copy()
    for chunk, page in zip(chunks, pages, strict=True):
        if 0 < page < NUM_PAGES:
            expected[:, page] = chunk
    got = run_scatter(pools, chunks, pages, backend, interpret)
    assert type(got) is list, "the pools that come out must go in again"
    for layer in range(NUM_LAYERS):
        check_bits(got[layer], expected[layer], backend)


@pytest.mark.parametrize(("size", "backend"), GATHERED, ids=str)
def test_gather_equals_numpy(size, backend):
    check_gather(random_pools(*size), backend, interpret=True)


@pytest.mark.parametrize(("size", "backend"), SCATTERED, ids=str)
def test_scatter_equals_numpy(size, backend):
    check_scatter(random_pools(*size), backend, interpret=True)


@pytest.mark.long
@pytest.mark.skipif(not OLDER_EMITTERS, reason="the tests above have looked at all bits")
def test_every_bit_is_kept_with_serving_options():
    """The bits of NaN in bfloat16 are kept, too."""
    command = [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"), __file__]
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        [*command, "-k", "equals_numpy and bfloat16"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_on_a_gpu(size, backend):
    pools = random_pools(*size)
    check_gather(pools, backend, interpret=False)
    check_scatter(pools, backend, interpret=False)


@pytest.mark.gpu
def test_a_pool_beyond_32_bits():
    """The pool has over 2**32 bytes: the last page needs a 64-bit offset."""
    num_pages, page = 2**17 + 9, 2**17 + 5
    shape = (num_pages, 32, 8, 128)
    chunk = jnp.arange(32 * 8 * 128, dtype=jnp.float32).astype(jnp.bfloat16).reshape(1, *shape[1:])
    scatter = jax.jit(functools.partial(scatter_pages, backend="pallas_triton"), donate_argnums=0)
    pages = np.array([page], np.int32)
    pools = scatter([jnp.zeros(shape, jnp.bfloat16)], [chunk], pages)
    assert not bool(pools[0][:page].any()) and not bool(pools[0][page + 1 :].any())
    (back,) = jax.jit(functools.partial(gather_pages, backend="pallas_triton"))(pools, pages)
    np.testing.assert_array_equal(bits(back), bits(chunk))


@pytest.mark.parametrize("backend", BACKENDS)
def test_donated_pools_are_updated_in_place(backend):
    pool, chunk = SHAPE((512, 16, 4, 64), jnp.float32), SHAPE((2, 16, 4, 64), jnp.float32)
    call = functools.partial(scatter_pages, backend=backend, interpret=True)
    lowered = jax.jit(call, donate_argnums=0).lower([pool] * 2, [chunk] * 4, SHAPE((4,), jnp.int32))
    memory = lowered.compile().memory_analysis()
    pool_bytes = 512 * 16 * 4 * 64 * 4
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    if backend == "xla":  # the interpreter copies as it likes
        assert memory.temp_size_in_bytes < pool_bytes


@pytest.mark.parametrize("num_chunks", [4, 64])
@pytest.mark.parametrize(
    ("page_size", "num_heads", "head_dim", "dtype", "num_pages"),
    [
        (32, 20, 128, "bfloat16", 3000),
        (64, 80, 128, "float32", 3000),
        (33, 20, 128, "int8", 3000),
        (16, 12, 64, "float16", 500000),
    ],
)
def test_lowers_for_cuda(num_chunks, page_size, num_heads, head_dim, dtype, num_pages):
    """All launches of an executable are the same kernel."""
    pools = [SHAPE((num_pages, page_size, num_heads, head_dim), dtype)] * 3
    chunks = [SHAPE((3, page_size, num_heads, head_dim), dtype)] * num_chunks
    pages = SHAPE((num_chunks,), jnp.int32)
    gather = lower_for_cuda(functools.partial(gather_pages, backend="pallas_triton"), pools, pages)
    scatter = lower_for_cuda(functools.partial(scatter_pages, backend="pallas_triton"), pools, chunks, pages)
    for text in (gather, scatter):
        assert 1 <= text.count("xla.gpu.triton") <= 2


def test_the_back_end_is_chosen_by_device_and_shape(monkeypatch):
    device = jax.devices("cpu")[0]
    assert choose_backend((32, 20, 128), device) == "xla"
    monkeypatch.setattr("pallas_kernels.page_copies.api.triton_device_limit", lambda device: None)
    assert choose_backend((32, 20, 128), device) == "pallas_triton"
    for shape in ((32, 20, 80), (8, 20, 128), (32, 4, 8)):
        assert choose_backend(shape, device) == "xla"


def test_what_does_not_fit_is_named():
    pool, other = jnp.zeros((4, 16, 2, 32)), jnp.zeros((4, 16, 4, 32))
    chunk, pages = jnp.zeros((1, 16, 2, 32)), jnp.zeros(1, jnp.int32)
    with pytest.raises(PageCopyError, match="pools are"):
        gather_pages([pool, other], pages)
    with pytest.raises(PageCopyError, match="pages are"):
        gather_pages([pool], pages.astype(jnp.float32))
    with pytest.raises(
        PageCopyError, match=r"chunks\[0\] is float32\[1, 16, 2, 32\], but must be float32\[2, "
    ):
        scatter_pages([pool, pool], [chunk], pages)
    with pytest.raises(PageCopyError, match="2 chunks are given for 1 pages"):
        scatter_pages([pool], [chunk, chunk], pages)
    with pytest.raises(PageCopyError, match="backend is 'cuda'"):
        gather_pages([pool], pages, backend="cuda")
    with pytest.raises(PageCopyError, match="use backend 'xla'"):
        gather_pages([jnp.zeros((4, 16, 2, 80))], pages, backend="pallas_triton")
