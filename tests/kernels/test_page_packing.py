"""Packed copies of pages: both back ends restore every bit, or report that they did not."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_copies import (
    PackedTile,
    PageCopyError,
    gather_packed,
    gather_pages,
    packed_copies,
    packed_tile,
    scatter_packed,
)
from pallas_kernels.page_copies.packing import num_escapes
from pallas_kernels.page_copies.triton_packing import Launches, triton_pack, triton_unpack
from tests.kernels.cross_lower import lower_for_cuda
from tests.seeds import enough

NUM_PAGES, NUM_LAYERS = 9, 2
BFLOAT16 = jnp.dtype(jnp.bfloat16)
SHAPE = jax.ShapeDtypeStruct
# (tokens of a page, combined heads, head_dim); Triton takes powers of two only
SIZES = [(16, 2, 64), (32, 2, 128), (32, 4, 64), (64, 2, 32), (16, 2, 256), (64, 2, 16)]
ODD_SIZES = [(32, 2, 80), (16, 2, 96), (64, 2, 8)]
BACKENDS = ["xla", "pallas_triton"]
# Interpreting the kernel takes seconds, so each test of it that is not long covers something different.
MOSTLY_XLA = ["xla", pytest.param("pallas_triton", marks=pytest.mark.long)]
EVERYWHERE = [
    *((size, "xla") for size in [*SIZES[1::4], *ODD_SIZES]),
    *(pytest.param(size, "xla", marks=pytest.mark.long) for i, size in enumerate(SIZES) if i % 4 != 1),
    (SIZES[0], "pallas_triton"),  # the interpreter takes seconds for each
    *(pytest.param(size, "pallas_triton", marks=pytest.mark.long) for size in SIZES[1 : enough(4, 6)]),
]


def normal_pools(page_size, num_heads, head_dim, seed=0):
    """Draw normally distributed pools, bf16[layers, pages, ...]."""
    rng = np.random.default_rng(seed)
    shape = (NUM_LAYERS, NUM_PAGES, page_size, num_heads, head_dim)
    return rng.standard_normal(shape, np.float32).astype(BFLOAT16)


def bits(array):
    return np.ascontiguousarray(np.asarray(array)).view(np.uint16)


@functools.cache
def compiled_gather(backend, interpret):
    return jax.jit(functools.partial(gather_packed, backend=backend, interpret=interpret))


@functools.cache
def compiled_scatter(backend, interpret):
    return jax.jit(functools.partial(scatter_packed, backend=backend, interpret=interpret), donate_argnums=0)


def run_gather(pools, pages, backend, interpret=True):
    call = compiled_gather(backend, interpret)
    return call([jnp.asarray(pool) for pool in pools], np.asarray(pages, np.int32))


def run_scatter(pools, chunks, pages, backend, interpret=True):
    call = compiled_scatter(backend, interpret)
    return call([jnp.array(pool) for pool in pools], list(chunks), np.asarray(pages, np.int32))


def there_and_back(pools, backend, interpret=True):
    """Pack pages and unpack them to empty ones; return the lost escapes and the unpacked pages."""
    pages = np.arange(1, NUM_PAGES)
    chunks, num_unplaced = run_gather(pools, pages, backend, interpret)
    empty = np.full_like(pools, -1)
    back = run_scatter(empty, chunks, pages, backend, interpret)
    assert type(back) is list and not np.any(bits(empty[:, 0]) != bits(np.stack(back)[:, 0]))
    return np.asarray(num_unplaced), np.stack([np.asarray(pool) for pool in back])


def check_there_and_back(pools, backend, interpret=True):
    num_unplaced, back = there_and_back(pools, backend, interpret)
    np.testing.assert_array_equal(num_unplaced, 0)
    np.testing.assert_array_equal(bits(back)[:, 1:], bits(pools)[:, 1:])


def expected_lost(page):
    """Count with numpy the unplaced escapes in the worst tile of bf16[layers, tokens, heads, head_dim]."""
    exponents = (bits(page).astype(np.int32) >> 7) & 255
    highest = exponents.max(axis=1, keepdims=True)
    column = np.minimum(highest.max(axis=3, keepdims=True) - highest, 15)
    row = np.where(exponents > 0, exponents + column, 0).max(axis=3, keepdims=True)
    counts = ((row - column - exponents > 13) & (exponents > 0)).sum(axis=(1, 3))
    return max(counts.max() - PackedTile(page.shape[1], page.shape[3]).num_places, 0)


def all_patterns(page_size, num_heads, head_dim):
    """Return all patterns of 16 bits, in rows with close enough exponents, padded with zeros."""
    patterns = np.arange(2**16, dtype=np.uint16)
    order = np.argsort((patterns >> 7) & 255, kind="stable")
    flat = np.zeros(NUM_LAYERS * NUM_PAGES * page_size * num_heads * head_dim, np.uint16)
    start = num_heads * page_size * head_dim  # layer 0, page 0 is unused
    flat[start : start + 2**16] = patterns[order]
    return flat.view(BFLOAT16).reshape(NUM_LAYERS, NUM_PAGES, page_size, num_heads, head_dim)


@pytest.mark.parametrize("backend", MOSTLY_XLA)
def test_every_pattern_comes_back(backend):
    """The patterns include signed zeros, subnormals, infinities and NaN with any payload."""
    pools = all_patterns(32, 4, 64)
    assert len(np.unique(bits(pools)[0, 1:])) == 2**16
    check_there_and_back(pools, backend)


@pytest.mark.parametrize(("size", "backend"), EVERYWHERE, ids=str)
def test_normal_numbers_come_back(size, backend):
    check_there_and_back(normal_pools(*size), backend)


@pytest.mark.parametrize(
    "size",
    [
        SIZES[1],
        *(pytest.param(size, marks=pytest.mark.long) for size in SIZES[: enough(4, 6)] if size != SIZES[1]),
    ],
    ids=str,
)
def test_back_ends_agree_on_every_byte(size):
    """Each unpacks what the other has packed; unused places are zeros."""
    pools = normal_pools(*size, seed=1)
    pools[:, 1:5, :, :, 1] *= np.float32(2**9)
    pools[:, 3, 2::3] = 0
    (chunks, lost), (others, other_lost) = (run_gather(pools, [5, 3, 1, 1, 0], b) for b in BACKENDS)
    np.testing.assert_array_equal(np.asarray(lost), np.asarray(other_lost))
    for one, other in zip(chunks, others, strict=True):
        assert one.dtype == jnp.uint8
        assert one.shape == (NUM_LAYERS, PackedTile(size[0], size[2]).num_rows, *size[1:])
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def check_cut(cut, size, interpret):
    """Check that Triton kernels with this cut give XLA's bytes, lost escapes and pages."""
    pools = normal_pools(*size, seed=3)
    pools[1, 2] = np.random.default_rng(0).integers(0, 2**16, size, np.uint16).view(BFLOAT16)
    arrays, pages = [jnp.asarray(pool) for pool in pools], jnp.asarray([5, 3, 2, 1, 8], jnp.int32)
    pack = jax.jit(functools.partial(triton_pack, interpret=interpret, cut=cut))
    chunks, lost = pack(arrays, pages)
    jax.tree.map(np.testing.assert_array_equal, (chunks, lost), run_gather(pools, pages, "xla", False))
    assert np.flatnonzero(np.asarray(lost)).tolist() == [2]
    unpack = jax.jit(functools.partial(triton_unpack, interpret=interpret, cut=cut), donate_argnums=0)
    back = unpack([jnp.zeros_like(pool) for pool in arrays], chunks, pages)
    for page in (5, 3, 1, 8):
        np.testing.assert_array_equal(bits(np.stack(back)[:, page]), bits(pools[:, page]))


@pytest.mark.long
def test_several_launches_of_other_sizes():
    check_cut(Launches(512, 2), (16, 2, 64), interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [Launches(512, 2), Launches(2048, 4), Launches(1024, 3)], ids=str)
def test_cuts_on_a_gpu(cut):
    check_cut(cut, (32, 4, 128), interpret=False)


def check_full_lists(size, backend):
    """Check a tile with as many escapes as places, then one more, in either half."""
    page_size, num_heads, head_dim = size
    tile = PackedTile(page_size, head_dim)
    pools = np.ones((NUM_LAYERS, NUM_PAGES, page_size, num_heads, head_dim), BFLOAT16)
    rng = np.random.default_rng(2)
    lanes = rng.permutation(page_size * (head_dim - 1))
    for page, count in enumerate([tile.num_places - 1, tile.num_places, tile.num_places + 1, 0], 1):
        rows, columns = np.divmod(lanes[:count], head_dim - 1)
        far = rng.choice([-1, 1], count) * 2.0 ** -rng.integers(14, 120, count)
        pools[1, page, rows, num_heads - 1, columns + 1] = far
    num_unplaced, back = there_and_back(pools, backend)
    np.testing.assert_array_equal(num_unplaced[:4], [0, 0, 1, 0])
    for page in (1, 2, 4):
        np.testing.assert_array_equal(bits(back[:, page]), bits(pools[:, page]))
    assert np.any(bits(back[:, 3]) != bits(pools[:, 3])), "the test does not tell"


@pytest.mark.long
@pytest.mark.parametrize(("size", "backend"), EVERYWHERE, ids=str)
def test_a_full_list_is_complete_and_one_more_escape_is_reported(size, backend):
    check_full_lists(size, backend)


def an_escape_is_lost(patch):
    """Plant a bug that loses the last escape of a full list."""
    unpack = packed_copies.unpack

    def unpacked(packed, page_size):
        return unpack(packed.at[:, -1, :, -1].set(0), page_size)

    patch.setattr(packed_copies, "unpack", unpacked)


def an_overflow_is_not_told(patch):
    pack = packed_copies.pack
    patch.setattr(packed_copies, "pack", lambda pages: (pack(pages)[0], jnp.zeros(len(pages), jnp.int32)))


def halves_are_mixed_up(patch):
    """Plant a bug that swaps the halves of the bytes of codes."""
    unpack = packed_copies.unpack

    def unpacked(packed, page_size):
        nibbles = packed[:, page_size : page_size + page_size // 2]
        swapped = (nibbles << 4) | (nibbles >> 4)
        return unpack(packed.at[:, page_size : page_size + page_size // 2].set(swapped), page_size)

    patch.setattr(packed_copies, "unpack", unpacked)


@pytest.mark.long
@pytest.mark.parametrize("bug", [an_escape_is_lost, an_overflow_is_not_told, halves_are_mixed_up])
def test_planted_bugs_show(bug, monkeypatch):
    check_full_lists((32, 2, 128), "xla")
    bug(monkeypatch)
    for name in ("compiled_gather", "compiled_scatter"):  # programs compiled before have no bug
        monkeypatch.setitem(globals(), name, globals()[name].__wrapped__)
    with pytest.raises(AssertionError):
        check_full_lists((32, 2, 128), "xla")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lost_escapes_are_counted_exactly(backend, seed):
    """With random bits and large numbers, complete pages are restored; lost escapes equal numpy's count."""
    pools = normal_pools(32, 4, 64, seed=seed)
    rng = np.random.default_rng(seed)
    for page in range(1, NUM_PAGES):
        large = rng.random(pools[:, page].shape) < rng.choice([0.0, 0.001, 0.02])
        pools[:, page][large] *= np.float32(2.0 ** rng.integers(4, 14))
    pools[:, 7] = rng.integers(0, 2**16, pools[:, 7].shape, np.uint16).view(BFLOAT16)
    num_unplaced, back = there_and_back(pools, backend)
    expected = [expected_lost(pools[:, page]) for page in range(1, NUM_PAGES)]
    np.testing.assert_array_equal(num_unplaced, expected)
    assert 0 < np.count_nonzero(num_unplaced) < NUM_PAGES - 1
    for page in np.flatnonzero(num_unplaced == 0) + 1:
        np.testing.assert_array_equal(bits(back[:, page]), bits(pools[:, page]))


TILES, FACTORS = [(32, 128), (32, 64), (16, 64), (64, 128)], [1, 2**5, 2**8, 2**12, 2**18]


@pytest.mark.parametrize(
    ("factor", "size"),
    [
        pytest.param(*case, marks=() if case[0] == 2**8 or case[1] == TILES[2] else pytest.mark.long)
        for case in itertools.product(FACTORS, TILES)
    ],
)
def test_outliers_fit(factor, size):
    """With a larger channel in every head and smaller tokens, half of the list is enough."""
    tiles = np.random.default_rng(4).standard_normal((1000, *size), np.float32)
    tiles[..., 3] *= factor
    tiles[::2, 5:9] /= 2**10
    assert num_escapes(jnp.asarray(tiles, jnp.bfloat16)).max() <= PackedTile(*size).num_places // 2


@pytest.mark.parametrize("size", [(32, 128), (16, 64)])
def test_channels_that_are_large_in_one_row_alone(size):
    """They set the columns' offsets for all rows: a factor of 2**10 fits, one of 2**14 does not."""
    for exponent, fits in ((10, True), (14, False)):
        tiles = np.random.default_rng(5).standard_normal((1000, *size), np.float32)
        tiles[:, 0, 3:7] *= 2**exponent
        most = num_escapes(jnp.asarray(tiles, jnp.bfloat16)).max()
        assert bool(most <= PackedTile(*size).num_places) is fits


@pytest.mark.parametrize("backend", MOSTLY_XLA)
def test_empty_rows_and_zeros_cost_nothing(backend):
    """Pages are unwritten, half written, poisoned, or have zeros or tiny numbers in many rows."""
    pools = normal_pools(32, 4, 64)
    pools[:, 1] = 0
    pools[:, 2, 7:] = 0
    pools[:, 3, 7:] = np.nan
    pools[:, 4, :, :, ::2] = 0
    pools[:, 5, :, :, 5:] = -0.0
    pools[:, 6, 9:] = pools[:, 8, 9:] * np.float32(1e-30)
    check_there_and_back(pools, backend)
    chunks, _ = run_gather(pools, [1, 3], backend)
    tile = PackedTile(32, 64)
    tail = np.asarray(chunks[0])[:, tile.first_tail_row :].transpose(0, 2, 1, 3).reshape(NUM_LAYERS, 4, -1)
    assert not tail[..., tile.first_place :].any(), "a row of zeros has escapes"


def test_unpacking_arbitrary_bytes_terminates():
    """All codes are escapes; the result is arbitrary, but the loop must end."""
    pools = normal_pools(16, 2, 64)
    chunks, _ = run_gather(pools, [1], "xla")
    garbage = [jnp.full_like(chunks[0], 0xFF)]
    back = np.stack(run_scatter(pools, garbage, [2], "pallas_triton"))
    np.testing.assert_array_equal(bits(back[:, [0, 1, 3]]), bits(pools[:, [0, 1, 3]]))


@pytest.mark.parametrize("backend", MOSTLY_XLA)
def test_padding_writes_nothing(backend):
    pools = normal_pools(16, 2, 64)
    chunks, _ = run_gather(pools, [4, 5, 6, 7], backend)
    back = run_scatter(pools, chunks, [0, 3, NUM_PAGES, 2**31 - 1], backend)
    expected = pools.copy()
    expected[:, 3] = pools[:, 5]
    np.testing.assert_array_equal(bits(np.stack(back)), bits(expected))


def test_sizes():
    """Packed pages take little over three quarters, with places for at least one number in 128."""
    assert packed_tile(32, 128) == PackedTile(32, 128)
    assert (PackedTile(32, 128).num_rows, PackedTile(32, 128).num_places) == (49, 32)
    for page_size in (16, 32, 64):
        for head_dim in (8, 16, 64, 80, 96, 128, 256):
            tile = packed_tile(page_size, head_dim)
            assert tile is not None and 0.75 < tile.share < 0.93, (page_size, head_dim)
            assert tile.num_places >= page_size * head_dim // 128
    for page_size, head_dim in ((33, 128), (32, 81), (16, 2), (16, 1)):
        assert packed_tile(page_size, head_dim) is None


@pytest.mark.parametrize(
    ("page_size", "num_heads", "head_dim", "num_chunks"),
    [
        pytest.param(*size, num_chunks, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, size in enumerate([(32, 20, 128), (16, 12, 64), (64, 8, 256)])
        for j, num_chunks in enumerate((16, 4))
    ],
)
def test_lowers_for_cuda(num_chunks, page_size, num_heads, head_dim):
    """All launches of an executable are the same kernel."""
    tile = PackedTile(page_size, head_dim)
    pools = [SHAPE((3000, page_size, num_heads, head_dim), jnp.bfloat16)] * 3
    chunks = [SHAPE((3, tile.num_rows, num_heads, head_dim), jnp.uint8)] * num_chunks
    pages = SHAPE((num_chunks,), jnp.int32)
    gather = lower_for_cuda(functools.partial(gather_packed, backend="pallas_triton"), pools, pages)
    scatter = lower_for_cuda(functools.partial(scatter_packed, backend="pallas_triton"), pools, chunks, pages)
    for text in (gather, scatter):
        assert 1 <= text.count("xla.gpu.triton") <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_on_a_gpu(size):
    pools = normal_pools(*size)
    pools[:, 1:5, :, :, 1] *= np.float32(2**6)
    for backend in ("xla", "pallas_triton"):
        check_there_and_back(pools, backend, interpret=False)
    triton, xla = (run_gather(pools, [5, 3, 1, 1, 8], b, False) for b in ("pallas_triton", "xla"))
    jax.tree.map(np.testing.assert_array_equal, triton, xla)


@pytest.mark.gpu
def test_every_pattern_on_a_gpu():
    check_there_and_back(all_patterns(32, 4, 64), "pallas_triton", interpret=False)


def test_what_cannot_be_packed_is_named():
    pages = jnp.zeros(1, jnp.int32)
    for pool in (jnp.zeros((4, 16, 2, 32)), jnp.zeros((4, 16, 2, 2), jnp.bfloat16)):
        with pytest.raises(PageCopyError, match=r"only long bfloat16 pages"):
            gather_packed([pool], pages)
    pool = jnp.zeros((4, 16, 2, 32), jnp.bfloat16)
    (chunk,) = gather_pages([pool], pages)
    with pytest.raises(PageCopyError, match=r"chunks\[0\] is bfloat16\[1, 16, 2, 32\], but must be uint8"):
        scatter_packed([pool], [chunk], pages)
