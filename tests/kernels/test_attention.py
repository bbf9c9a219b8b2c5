"""Every back end that runs on a CPU against the dense reference."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    BlockSizes,
    TileClass,
    build_tiles,
    import_backend,
    pallas_triton,
    ragged_paged_attention,
    tile_spec,
    xla,
)
from pallas_kernels.ragged_paged_attention.backends import TILED_BACKENDS
from pallas_kernels.ragged_paged_attention.page_formats import PageKind
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import Batch, Room, assert_equals_reference, make_batch, random_rows
from tests.kernels.cross_lower import lower_for_cuda

SCALE = 0.17
# Few programs and short splits, so that small batches are also split and merged, and interpreting is quick.
SMALL_BLOCKS = BlockSizes((TileClass(16, 32, 4, 2, 64, 8), TileClass(64, 16, 4, 2, 64, 8)))
ONE_CLASS = BlockSizes((TileClass(16, 16, 4, 2, 32, 16, whole_loop=False),))

ROWS = [(1, 70), (5, 33), (40, 40), (1, 1), (0, 12), (300, 310), (17, 200), (8, 8)]


@functools.cache
def compiled(backend: str, blocks: BlockSizes | None = None, traced_tiles: bool = False) -> Any:
    """Return jitted attention; it takes (spec, tiles built on the host) unless `traced_tiles`."""

    def attend(batch: Batch, tiles: Any, spec: Any) -> Any:
        return ragged_paged_attention(
            *batch, sm_scale=SCALE, backend=backend, interpret=True,
            metadata=None if spec is None else (spec, tiles), blocks=blocks if spec is None else None,
        )  # fmt: skip

    # Interpreted kernels are large programs that run once: compile them fast rather than well.
    options = {"xla_backend_optimization_level": 0} if backend == "pallas_triton" else None
    jitted = jax.jit(attend, static_argnums=2, compiler_options=options)

    def run(batch: Batch) -> Any:
        if backend == "xla" or traced_tiles:
            return jitted(batch, None, None)
        spec = tile_spec(
            num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=batch.q.shape[1],
            num_kv_heads=batch.kv_pages.shape[2] // 2, head_dim=batch.q.shape[2], dtype=batch.q.dtype,
            page_size=batch.kv_pages.shape[1], backend=backend, blocks=blocks,
        )  # fmt: skip
        tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
        return jitted(batch, tiles, spec)

    return run


@functools.cache
def compiled_form(form: str) -> Any:
    """Return one form of the back end `xla`, compiled for this platform even if it is another's form."""
    attend = getattr(xla, form)
    return jax.jit(lambda batch: attend(*batch, sm_scale=SCALE, kind=PageKind(batch.kv_pages.shape[1])))


FORMS = ["one_after_another", "together"]


XLA_SIZES = [(Heads(4, 4, 32), 16), (Heads(8, 2, 80), 32), (Heads(8, 1, 64), 64), (Heads(6, 2, 128), 16)]


@pytest.mark.parametrize(
    ("heads", "page_size", "form"),
    [
        pytest.param(*sizes, form, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, sizes in enumerate(XLA_SIZES)
        for j, form in enumerate(FORMS)
    ],
)
def test_xla_equals_reference(heads: Heads, page_size: int, form: str) -> None:
    batch = make_batch(np.random.default_rng(page_size), ROWS, heads, page_size=page_size)
    assert_equals_reference(compiled_form(form)(batch), batch, SCALE)


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(dtype, form, marks=pytest.mark.long if i != j else ())
        for i, dtype in enumerate(["float16", "bfloat16"])
        for j, form in enumerate(FORMS)
    ],
)
def test_xla_16_bits(dtype: str, form: str) -> None:
    batch = make_batch(np.random.default_rng(7), ROWS, Heads(4, 2, 32), dtype=dtype)
    assert_equals_reference(compiled_form(form)(batch), batch, SCALE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rows", "num_tokens"),
    [
        ([(1, 130), (1, 1), (1, 64), (0, 40), (1, 65)], 9),  # rows of one query, in a room for more
        ([(3, 130), (0, 0), (4, 70), (1, 33)], 8),  # the size up to which all tiles have one token
        (
            [(1, 20), (40, 100), (1, 90), (2, 66), (1, 7)],
            45,
        ),  # past a tile's last token, and full to the end
        ([(32, 32), (32, 64)], 64),
    ],
    ids=["decode", "small", "mixed", "full tiles"],
)
def test_xla_goes_on_over_blocks(
    rows: list[tuple[int, int]], num_tokens: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have two pages; the last is full, or has an unused slot or page that must not be read."""
    monkeypatch.setattr(xla, "_MAX_CACHED_KEYS", 32)
    monkeypatch.setattr(xla, "_MAX_BLOCK_KEYS", 32)
    room = Room(num_tokens, max_num_seqs=6, pages_per_seq=9, num_pages=30)
    batch = make_batch(np.random.default_rng(2), rows, Heads(4, 2, 32), room=room)
    assert_equals_reference(compiled_form.__wrapped__(form)(batch), batch, SCALE)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "DEFAULT"), ("float32", "HIGHEST")])
def test_xla_for_a_gpu_has_products_of_the_pages_dtype(dtype: str, precision: str) -> None:
    """Lowered for a GPU on any machine, no part of a page becomes float32 before a product."""
    batch = make_batch(np.random.default_rng(0), [(1, 5)] * 4, Heads(4, 2, 32), dtype=dtype)
    attend = functools.partial(ragged_paged_attention, sm_scale=SCALE, backend="xla")
    text = lower_for_cuda(attend, *map(jnp.asarray, batch))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    for line in products:
        assert f"precision = [{precision}, {precision}]" in line
        operands, result = line.rsplit("->", 1)
        assert operands.count(f"x{short}>") == 2 and "xf32>" in result


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "blocks"),
    [
        pytest.param(  # a block of keys spans pages, as in the random batches
            Heads(4, 4, 32), 16, "float32", SMALL_BLOCKS, marks=pytest.mark.long
        ),
        pytest.param(  # a block is a page, or half of one
            Heads(8, 2, 64), 32, "float16", SMALL_BLOCKS, marks=pytest.mark.long
        ),
        (Heads(8, 1, 32), 64, "bfloat16", SMALL_BLOCKS),
        pytest.param(  # 3 heads per group do not fill a tile
            Heads(6, 2, 32), 16, "float32", ONE_CLASS, marks=pytest.mark.long
        ),
    ],
    ids=["group1", "group4", "group8", "group3"],
)
def test_triton_equals_reference(heads: Heads, page_size: int, dtype: str, blocks: BlockSizes) -> None:
    batch = make_batch(np.random.default_rng(page_size), ROWS, heads, page_size=page_size, dtype=dtype)
    assert_equals_reference(compiled("pallas_triton", blocks)(batch), batch, SCALE)


def test_a_program_of_the_merge_walks_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one program per KV head, that program does all merges."""
    monkeypatch.setattr(pallas_triton, "_MERGE_PROGRAMS", 1)
    blocks = BlockSizes((TileClass(16, 16, 4, 2, 32, 64),))
    batch = make_batch(np.random.default_rng(0), ROWS[:4], Heads(4, 2, 32), page_size=16)
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=4, num_kv_heads=2,
        head_dim=32, dtype=batch.q.dtype, page_size=16, backend="pallas_triton", blocks=blocks,
    )  # fmt: skip
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    assert tiles[len(spec.blocks.classes)] > 2, "nothing to walk"
    run = compiled.__wrapped__("pallas_triton", blocks)  # not one that other tests have compiled
    assert_equals_reference(run(batch), batch, SCALE)


def test_triton_makes_its_own_tiles() -> None:
    batch = make_batch(np.random.default_rng(3), ROWS[:5], Heads(4, 2, 32))
    assert_equals_reference(compiled("pallas_triton", ONE_CLASS, traced_tiles=True)(batch), batch, SCALE)


ROOM = Room(num_tokens=96, max_num_seqs=9, pages_per_seq=14, num_pages=50)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_batches_in_both_forms(form: str, seed: int) -> None:
    """This recompiles nothing, either."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, random_rows(rng, ROOM, 16, 90), Heads(4, 2, 32), room=ROOM)
    assert_equals_reference(compiled_form(form)(batch), batch, SCALE)


@pytest.mark.parametrize("backend", ["pallas_triton"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_batches(backend: str, seed: int) -> None:
    """This recompiles nothing: every batch fits one room."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, ROOM, 16, 90)
    batch = make_batch(rng, rows, Heads(4, 2, 32), room=ROOM)
    blocks = SMALL_BLOCKS if backend == "pallas_triton" else None
    assert_equals_reference(compiled(backend, blocks)(batch), batch, SCALE)


@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
def test_sub_requests_share_a_page_list(backend: str) -> None:
    """A recomputed leading range [0, 20) and the new prompt [90, 100) are two rows over one page list."""
    rng = np.random.default_rng(11)
    rows = [(10, 100), (20, 20), (6, 50), (1, 60)]
    batch = make_batch(rng, rows, Heads(4, 2, 32), room=ROOM, shared={1: 0, 2: 0})
    blocks = SMALL_BLOCKS if backend == "pallas_triton" else None
    out = compiled(backend, blocks)(batch)
    assert_equals_reference(out, batch, SCALE)
    # Two ranges give the same results as one whole row at their positions.
    q = (
        jnp.full_like(batch.q, 0)
        .at[:20]
        .set(batch.q[10:30])
        .at[90:]
        .set(batch.q[:6])
        .at[90:96]
        .set(batch.q[:6])
    )
    whole = batch._replace(
        q=q, cu_q_lens=np.array([0, 96] + [96] * 8, np.int32), num_seqs=np.array([1], np.int32),
        kv_lens=np.array([96] + [0] * 8, np.int32),
    )  # fmt: skip
    got = compiled(backend, blocks)(whole)
    np.testing.assert_allclose(got[:20], out[10:30], atol=1e-5, rtol=0)
    np.testing.assert_allclose(got[90:96], out[:6], atol=1e-5, rtol=0)


def test_keys_that_a_part_hides_from_a_query_have_no_weight() -> None:
    """The last part of a range has fewer keys than the tile has tokens; the sum of their values overflows."""
    kv_len = 130
    batch = make_batch(np.random.default_rng(5), [(8, kv_len)], Heads(1, 1, 32), page_size=32)
    pages = np.array(batch.kv_pages)
    for key in (kv_len - 2, kv_len - 1):
        pages[batch.page_indices[0, key // 32], key % 32, 1] = 3e38
    batch = batch._replace(kv_pages=pages)
    out = np.asarray(compiled("pallas_triton", SMALL_BLOCKS)(batch))[:6]
    with np.errstate(over="ignore"):  # overflows for the queries that see them
        expected = reference_attention(*batch, sm_scale=SCALE)[:6]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
def test_no_rows_gives_zeros(backend: str) -> None:
    batch = make_batch(np.random.default_rng(0), [], Heads(4, 2, 32), room=ROOM)
    out = compiled(backend, SMALL_BLOCKS if backend == "pallas_triton" else None)(batch)
    assert not np.asarray(out).any()


def test_xla_memory_does_not_grow_with_the_context() -> None:
    """128 rows of 512 pages: temporary memory is bounded by a block of keys, not by the context."""
    shape = jax.ShapeDtypeStruct
    args = (
        shape((128, 8, 64), jnp.bfloat16), shape((70000, 32, 4, 64), jnp.bfloat16), shape((128,), jnp.int32),
        shape((128, 512), jnp.int32), shape((129,), jnp.int32), shape((1,), jnp.int32),
    )  # fmt: skip
    attend = functools.partial(ragged_paged_attention, sm_scale=SCALE, backend="xla")
    memory = jax.jit(attend).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 << 20


def test_inside_shard_map() -> None:
    """Heads split over four devices give the results of one device."""
    batch = make_batch(np.random.default_rng(5), [(1, 70), (20, 40), (3, 3)], Heads(8, 4, 32), room=ROOM)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, none = jax.sharding.PartitionSpec(None, "tp"), jax.sharding.PartitionSpec()
    pool = jax.sharding.PartitionSpec(None, None, "tp")
    attend = functools.partial(ragged_paged_attention, sm_scale=SCALE, backend="xla")
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, pool, none, none, none, none), out_specs=heads
    )
    assert_equals_reference(jax.jit(sharded)(*batch), batch, SCALE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_import_of_a_backend(backend: str) -> None:
    """A process that runs a loaded program needs the modules that its kernels call."""
    if backend == "jax_triton":
        pytest.importorskip("jax_triton", reason="needs the extra 'triton'")
    import_backend(backend)
    if backend in TILED_BACKENDS:
        assert f"pallas_kernels.ragged_paged_attention.{backend}" in sys.modules
    if backend == "pallas_mosaic_gpu":
        assert "jax.experimental.mosaic.gpu.core" in sys.modules  # it sets the location of the runtime
