"""The compiled kernels on an NVIDIA GPU against the dense reference."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.devices import mosaic_device_limit
from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    TileSpec,
    build_tiles,
    byte_class,
    byte_prompt_class,
    mosaic_class,
    page_shape,
    ragged_paged_attention,
    tile_spec,
    write_kv,
)
from pallas_kernels.ragged_paged_attention.block_sizes import default_block_sizes
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import (
    Batch,
    Room,
    assert_equals_reference,
    hide_pages,
    make_batch,
    random_rows,
    stored,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

SCALE = 0.11


def tuned(num_tokens: int) -> BlockSizes:
    """Return the tuned classes of the Mosaic kernel for steps of this many tokens, for any heads."""
    blocks = default_block_sizes(
        num_tokens=num_tokens, max_num_seqs=24, num_q_heads=20, num_kv_heads=20, head_dim=128, itemsize=2,
        mosaic=True,
    )  # fmt: skip
    assert all(tile_class.mosaic for tile_class in blocks.classes)
    return blocks


# For steps of few tokens and of many; beside the Triton kernel, with blocks of 64 keys; and everything split.
SMALL = TileClass(16, 32, 2, 4, 256, 2048)
MOSAIC_BLOCKS = (
    tuned(64),
    tuned(512),
    BlockSizes((SMALL, mosaic_class(128, 64, 4, 1024, 528))),
    BlockSizes((mosaic_class(64, 64, 5, 256, 528), mosaic_class(128, 64, 5, 128, 2048))),
)


def compile_attention(
    batch: Batch, backend: str = "auto", blocks: BlockSizes | None = None, **options: Any
) -> Any:
    """Compile attention of batches of this room, by the back end that "auto" selects or a named one.

    `options` are `window`, `softcap` and `sinks`. Skip the test if the named one does not run here.
    """
    if backend == "jax_triton":
        pytest.importorskip("jax_triton", reason="needs the extra 'triton'")
    if backend == "pallas_mosaic_gpu" and (limit := mosaic_device_limit(jax.devices()[0])):
        pytest.skip(limit)
    spec = tile_spec(
        num_tokens=batch.q.shape[0],
        max_num_seqs=len(batch.kv_lens),
        num_q_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pages.shape[2] // 2,
        head_dim=batch.q.shape[2],
        page_size=batch.kv_pages.shape[1],
        dtype=batch.q.dtype,
        backend=backend,
        blocks=blocks,
        window=options.get("window"),
        softcap=options.get("softcap"),
        has_sinks="sinks" in options,
    )
    assert spec.backend == backend or (backend == "auto" and spec.backend != "xla")
    jitted = jax.jit(
        lambda b, tiles: ragged_paged_attention(*b, sm_scale=SCALE, metadata=(spec, tiles), **options)
    )
    return lambda b: jitted(b, build_tiles(spec, b.cu_q_lens, b.kv_lens, b.num_seqs))


@pytest.mark.parametrize("backend", ["pallas_triton", "jax_triton"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [(Heads(4, 2, 32), 16), (Heads(12, 12, 64), 64), (Heads(20, 5, 128), 32), (Heads(16, 2, 256), 32)],
    ids=["32", "64", "128", "256"],
)
def test_many_seeds(heads: Heads, page_size: int, dtype: str, backend: str) -> None:
    """The tolerance of float32 is 1e-5, so TF32 would show. Contexts are long enough to be split."""
    room = Room(num_tokens=384, max_num_seqs=24, pages_per_seq=3072 // page_size, num_pages=5120 // page_size)
    attend = None
    for seed in range(12):
        rng = np.random.default_rng(seed)
        batch = make_batch(
            rng, random_rows(rng, room, page_size, 300), heads, page_size=page_size, dtype=dtype, room=room
        )
        attend = attend or compile_attention(batch, backend)
        try:
            assert_equals_reference(attend(batch), batch, SCALE)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("blocks", MOSAIC_BLOCKS, ids=["few", "both", "beside", "split"])
@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"),
    [
        (Heads(8, 8, 64), 64, "float16"),
        (Heads(20, 20, 128), 16, "bfloat16"),
        (Heads(20, 5, 128), 32, "bfloat16"),
        (Heads(16, 2, 128), 32, "float16"),
        (Heads(16, 1, 128), 16, "bfloat16"),
        (Heads(14, 2, 64), 32, "bfloat16"),
        (Heads(28, 4, 128), 32, "bfloat16"),
    ],
    ids=["64", "group1", "group4", "group8", "group16", "64_group7", "group7"],
)
def test_mosaic_many_seeds(heads: Heads, page_size: int, dtype: str, blocks: BlockSizes) -> None:
    """Every seed runs three times: an assembler may reuse the weights' registers too early."""
    room = Room(num_tokens=512, max_num_seqs=24, pages_per_seq=3072 // page_size, num_pages=5120 // page_size)
    attend = None
    for seed in range(12):
        rng = np.random.default_rng(seed)
        rows = random_rows(rng, room, page_size, 300)
        batch = make_batch(rng, rows, heads, page_size=page_size, dtype=dtype, room=room)
        attend = attend or compile_attention(batch, "pallas_mosaic_gpu", blocks)
        first = np.asarray(attend(batch))
        try:
            assert_equals_reference(first, batch, SCALE)
            for _ in range(2):
                np.testing.assert_array_equal(np.asarray(attend(batch)), first)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def sinks_of(heads: Heads) -> np.ndarray:
    return np.resize(np.array([-20, 0, 3, 20], np.float32), heads.num_q_heads)


def check_options(
    heads: Heads, page_size: int, dtype: str, backend: str, blocks: BlockSizes | None, options: dict[str, Any]
) -> None:
    """Check random batches with NaN in pages before all windows of a row, three times with the same bits."""
    room = Room(num_tokens=512, max_num_seqs=24, pages_per_seq=3072 // page_size, num_pages=5120 // page_size)
    attend = None
    for seed in range(6):
        rng = np.random.default_rng(seed)
        rows = random_rows(rng, room, page_size, 300)
        batch = make_batch(rng, rows, heads, page_size=page_size, dtype=dtype, room=room)
        attend = attend or compile_attention(batch, backend, blocks, **options)
        given = hide_pages(batch, options["window"], page_size=page_size) if "window" in options else batch
        first = np.asarray(attend(given))
        try:
            assert_equals_reference(first, batch, SCALE, **options)
            for _ in range(2):
                np.testing.assert_array_equal(np.asarray(attend(given)), first)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("window", [1, 33, 128, 130, 1000, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_windows_in_triton(window: int, dtype: str) -> None:
    check_options(Heads(20, 5, 128), 32, dtype, "pallas_triton", None, {"window": window})


@pytest.mark.parametrize(
    ("heads", "dtype", "with_sinks", "options"),
    [
        (Heads(16, 2, 64), "bfloat16", True, {"window": 128}),
        (Heads(16, 2, 64), "float32", True, {}),
        (Heads(16, 2, 256), "bfloat16", False, {"window": 1000, "softcap": 5.0}),
        (Heads(4, 2, 32), "float32", True, {"window": 130, "softcap": 5.0}),
    ],
    ids=["gpt_oss", "sinks", "softcap", "all"],
)
def test_score_options_in_triton(heads: Heads, dtype: str, with_sinks: bool, options: dict[str, Any]) -> None:
    options = options | ({"sinks": sinks_of(heads)} if with_sinks else {})
    check_options(heads, 32, dtype, "pallas_triton", None, options)


@pytest.mark.parametrize("blocks", MOSAIC_BLOCKS, ids=["few", "both", "beside", "split"])
@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "window", "with_sinks"),
    [
        (Heads(20, 5, 128), 32, "bfloat16", 1, False),
        (Heads(20, 5, 128), 32, "bfloat16", 33, False),
        (Heads(20, 5, 128), 16, "bfloat16", 128, True),
        (Heads(20, 5, 128), 32, "float16", 1000, False),
        (Heads(20, 5, 128), 32, "bfloat16", 4096, True),
        (Heads(64, 8, 64), 32, "bfloat16", 128, True),
        (Heads(20, 20, 128), 64, "bfloat16", 1000, True),
        (Heads(28, 4, 128), 32, "bfloat16", None, True),
    ],
    ids=["1", "33", "128", "1000", "4096", "gpt_oss", "group1", "sinks"],
)
def test_windows_and_sinks_in_mosaic(
    heads: Heads, page_size: int, dtype: str, window: int | None, with_sinks: bool, blocks: BlockSizes
) -> None:
    options: dict[str, Any] = {} if window is None else {"window": window}
    options |= {"sinks": sinks_of(heads)} if with_sinks else {}
    check_options(heads, page_size, dtype, "pallas_mosaic_gpu", blocks, options)


def test_a_window_of_all_keys_changes_no_bit_in_mosaic() -> None:
    batch = make_batch(
        np.random.default_rng(2), [(1, 3000), (200, 900), (7, 7)], Heads(20, 5, 128), page_size=32,
        dtype="bfloat16",
    )  # fmt: skip
    whole, within = (
        np.asarray(compile_attention(batch, "pallas_mosaic_gpu", **options)(batch))
        for options in ({}, {"window": 3000})
    )
    np.testing.assert_array_equal(whole, within)


@pytest.mark.parametrize("backend", ["pallas_triton", "pallas_mosaic_gpu", "jax_triton"])
def test_part_of_a_range_that_a_query_does_not_see(backend: str) -> None:
    """The last part of a long range is shorter than the tile's tokens: its first queries see none of it."""
    # A small tile, a large one, and enough tokens for that class.
    rows = [(4, 2049), (40, 16400), (300, 300)]
    batch = make_batch(np.random.default_rng(3), rows, Heads(4, 2, 64), page_size=32, dtype="bfloat16")
    assert_equals_reference(compile_attention(batch, backend)(batch), batch, SCALE)


@pytest.mark.parametrize("backend", ["auto", "jax_triton"])
@pytest.mark.parametrize("heads", [Heads(40, 40, 128), Heads(40, 10, 128), Heads(64, 8, 128)], ids=str)
def test_decode_of_many_rows(heads: Heads, backend: str) -> None:
    """A decode bucket has one token per row, all remainders of contexts by blocks, and padded rows."""
    rows = [(1, 1 + 37 * i) for i in range(60)]
    room = Room(num_tokens=64, max_num_seqs=64, pages_per_seq=70, num_pages=2200)
    batch = make_batch(np.random.default_rng(1), rows, heads, page_size=32, dtype="bfloat16", room=room)
    assert_equals_reference(compile_attention(batch, backend)(batch), batch, SCALE)


@pytest.mark.parametrize("backend", ["auto", "jax_triton"])
@pytest.mark.parametrize("heads", [Heads(40, 10, 128), Heads(64, 8, 128)], ids=str)
def test_hardly_any_tokens(heads: Heads, backend: str) -> None:
    """Triton computes these steps also on Hopper: long contexts in the largest number of parts."""
    room = Room(num_tokens=16, max_num_seqs=8, pages_per_seq=512, num_pages=700)
    attend = None
    for seed in range(12):
        rng = np.random.default_rng(seed)
        rows = [(1, 16384 - seed), *random_rows(rng, room._replace(num_tokens=15, num_pages=180), 32, 8)][:8]
        batch = make_batch(rng, rows, heads, page_size=32, dtype="bfloat16", room=room)
        attend = attend or compile_attention(batch, backend)
        try:
            assert_equals_reference(attend(batch), batch, SCALE)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("backend", ["auto", "jax_triton"])
def test_results_repeat_bit_for_bit(backend: str) -> None:
    batch = make_batch(
        np.random.default_rng(2),
        [(1, 3000), (200, 900), (7, 7)],
        Heads(20, 5, 128),
        page_size=32,
        dtype="bfloat16",
    )
    attend = compile_attention(batch, backend)
    first = np.asarray(attend(batch))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(attend(batch)), first)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_pages_in_8_bits(kv_dtype: str, dtype: str) -> None:
    heads = Heads(40, 10, 128)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = [(1, int(length)) for length in rng.integers(1, 2000, 30)] + [(200, 900), (7, 700)]
        batch = stored(make_batch(rng, rows, heads, page_size=32, dtype=dtype), kv_dtype)
        out = jax.jit(lambda b: ragged_paged_attention(*b, sm_scale=SCALE, kv_dtype=kv_dtype))(batch)
        assert_equals_reference(out, batch, SCALE, page_size=32, kv_dtype=kv_dtype)


# Two pairs as by default, one and three, blocks of 64 keys, tiles of 16 rows, and everything split.
BYTE_BLOCKS = {
    "default": None,
    "one_pair": (byte_class(8, 128, 1, 6, 256, 132), TileClass(64, 64, 4, 3, 1024, 132)),
    "three_pairs": (byte_class(8, 64, 3, 3, 256, 396), TileClass(64, 64, 4, 3, 1024, 132)),
    "sixteen_rows": (byte_class(16, 64, 2, 5, 256, 264),),
    "split": (byte_class(8, 64, 2, 6, 64, 8192),),
}


def check_bytes(spec: TileSpec, batches: Iterable[Batch], sinks: np.ndarray | None = None) -> None:
    """Check results over pages in 8 bits against the reference, three times with the same bits."""
    kv_dtype, window = spec.kv_dtype, spec.window
    assert kv_dtype is not None
    attend = jax.jit(
        lambda b, tiles: ragged_paged_attention(
            *b, sm_scale=SCALE, window=window, sinks=sinks, metadata=(spec, tiles), kv_dtype=kv_dtype
        )
    )
    for seed, whole in enumerate(batches):
        batch = stored(whole, kv_dtype)
        if window is not None:
            batch = hide_pages(batch, window, page_size=spec.page_size)
        rows = (batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
        tiles = build_tiles(spec, *rows, None, batch.page_indices)
        first = np.asarray(attend(batch, tiles))
        try:
            assert_equals_reference(
                first, batch, SCALE, page_size=spec.page_size, kv_dtype=kv_dtype, window=window, sinks=sinks
            )
            for _ in range(2):
                np.testing.assert_array_equal(np.asarray(attend(batch, tiles)), first)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype", "blocks"),
    [
        (Heads(20, 5, 128), 32, "int8", "default"),
        (Heads(20, 5, 128), 32, "float8_e4m3fn", "default"),
        (Heads(5, 5, 128), 64, "int8", "default"),
        (Heads(25, 5, 128), 32, "int8", "default"),
        (Heads(40, 5, 128), 64, "float8_e4m3fn", "default"),
        (Heads(80, 5, 128), 32, "int8", "default"),
        (Heads(80, 5, 128), 64, "float8_e4m3fn", "default"),
        (Heads(20, 5, 128), 64, "int8", "one_pair"),
        (Heads(20, 5, 128), 32, "int8", "three_pairs"),
        (Heads(20, 5, 128), 32, "float8_e4m3fn", "sixteen_rows"),
        (Heads(20, 5, 128), 32, "int8", "split"),
    ],
    ids=lambda value: f"group{value.num_q_heads // value.num_kv_heads}" if isinstance(value, Heads) else None,
)
def test_byte_kernel(heads: Heads, page_size: int, kv_dtype: str, blocks: str) -> None:
    """Decoding and short queries; every result is computed three times, with the same bits."""
    if limit := mosaic_device_limit(jax.devices()[0]):
        pytest.skip(limit)
    room = Room(num_tokens=64, max_num_seqs=64, pages_per_seq=2560 // page_size, num_pages=16384 // page_size)
    classes = BYTE_BLOCKS[blocks]
    spec = tile_spec(
        num_tokens=64, max_num_seqs=64, num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads,
        head_dim=128, page_size=page_size, dtype="bfloat16", backend="pallas_mosaic_gpu", kv_dtype=kv_dtype,
        blocks=None if classes is None else BlockSizes(classes),
    )  # fmt: skip
    assert spec.blocks.classes[0].in_bytes
    batches = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        lens = [1, 2, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 1024, 2500, *rng.integers(1, 900, 10)]
        rows = [(1, int(length)) for length in lens] + [(2, 2), (2, 700), (9, 130), (0, 40)]
        rng.shuffle(rows)
        batches.append(make_batch(rng, rows, heads, page_size=page_size, dtype="bfloat16", room=room))
    check_bytes(spec, batches)


# For steps of few tokens and of many, as by default; with blocks of 128 keys; and everything split.
PROMPT_BLOCKS = {
    "default": None,
    "long_blocks": (byte_class(8, 128, 2, 3, 256, 264), byte_prompt_class(128, 128, 2, 1024, 264)),
    "alone": (byte_prompt_class(64, 64, 2, 256, 264), byte_prompt_class(128, 128, 2, 128, 264)),
    "split": (byte_class(8, 64, 2, 6, 64, 8192), byte_prompt_class(64, 128, 2, 128, 2048)),
}


# Pages that fit the scratch pool: none, one prompt's, all.
@pytest.mark.parametrize(
    ("num_tokens", "scratch_pages"),
    [(128, 0), (768, 0), (768, 92), (768, 500)],
    ids=["few", "many", "scratch_of_one", "scratch"],
)
@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype", "blocks"),
    [
        (Heads(20, 5, 128), 32, "int8", "default"),
        (Heads(20, 5, 128), 32, "float8_e4m3fn", "default"),
        (Heads(20, 5, 128), 64, "int8", "default"),
        (Heads(5, 5, 128), 32, "int8", "default"),
        (Heads(25, 5, 128), 32, "int8", "default"),
        (Heads(40, 5, 128), 64, "float8_e4m3fn", "default"),
        (Heads(32, 2, 128), 32, "int8", "default"),
        (Heads(20, 5, 128), 32, "int8", "long_blocks"),
        (Heads(20, 5, 128), 64, "float8_e4m3fn", "alone"),
        (Heads(20, 5, 128), 32, "int8", "split"),
    ],
    ids=lambda value: f"group{value.num_q_heads // value.num_kv_heads}" if isinstance(value, Heads) else None,
)
def test_byte_prompt_kernel(
    heads: Heads, page_size: int, kv_dtype: str, blocks: str, num_tokens: int, scratch_pages: int
) -> None:
    """Prompts, with and without history, beside decoding; three times, with the same bits."""
    if limit := mosaic_device_limit(jax.devices()[0]):
        pytest.skip(limit)
    room = Room(num_tokens, max_num_seqs=24, pages_per_seq=3072 // page_size, num_pages=12288 // page_size)
    classes = PROMPT_BLOCKS[blocks]
    if classes is not None and scratch_pages:
        classes = (*classes, mosaic_class(128, 128, 2, 1024, 264, fills_rounds=True))
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=24, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=128, page_size=page_size, dtype="bfloat16",
        backend="pallas_mosaic_gpu", kv_dtype=kv_dtype,
        blocks=None if classes is None else BlockSizes(classes), scratch_pages=scratch_pages,
    )  # fmt: skip
    assert [c.in_bytes for c in spec.blocks.classes][2:] == [False] * (scratch_pages > 0)
    half, quarter = num_tokens // 2, num_tokens // 4
    fixed = [(half, 2900), (quarter, quarter), (17, 2049), (3, 129), (1, 700), (0, 40)]
    batches = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        rows = fixed if seed == 0 else random_rows(rng, room, page_size, half)
        batches.append(make_batch(rng, rows, heads, page_size=page_size, dtype="bfloat16", room=room))
    check_bytes(spec, batches)


@pytest.mark.parametrize("window", [1, 33, 130, 1000])
@pytest.mark.parametrize(
    ("heads", "kv_dtype", "num_tokens", "scratch_pages", "with_sinks"),
    [
        (Heads(20, 5, 128), "int8", 64, 0, False),
        (Heads(20, 5, 128), "float8_e4m3fn", 128, 0, True),
        (Heads(80, 5, 128), "int8", 64, 0, True),
        (Heads(20, 5, 128), "int8", 768, 0, True),
        (Heads(20, 5, 128), "int8", 768, 500, False),
        (Heads(40, 5, 128), "float8_e4m3fn", 768, 500, True),
    ],
)
def test_windows_and_sinks_over_bytes(
    heads: Heads, kv_dtype: str, num_tokens: int, scratch_pages: int, with_sinks: bool, window: int
) -> None:
    """Decoding, prompts that convert codes, and prompts that read decoded pages."""
    if limit := mosaic_device_limit(jax.devices()[0]):
        pytest.skip(limit)
    room = Room(num_tokens, max_num_seqs=24, pages_per_seq=96, num_pages=384)
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=24, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=128, page_size=32, dtype="bfloat16",
        backend="pallas_mosaic_gpu", kv_dtype=kv_dtype, scratch_pages=scratch_pages, window=window,
    )  # fmt: skip
    fixed = [(num_tokens // 2, 2900), (17, 2049), (3, 129), (1, 700), (1, 64), (1, 33), (0, 40)]
    batches = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = fixed if seed == 0 else random_rows(rng, room, 32, num_tokens // 2)
        batches.append(make_batch(rng, rows, heads, page_size=32, dtype="bfloat16", room=room))
    check_bytes(spec, batches, sinks_of(heads) if with_sinks else None)


def test_int8_is_written_as_by_xla() -> None:
    """Codes are equal except within rounding of the next one."""
    rng = np.random.default_rng(0)
    pool = jnp.zeros((300, *page_shape("int8", 32, 10, 128)), jnp.int8)
    k, v = (jnp.asarray(rng.standard_normal((2000, 10, 128)), jnp.bfloat16) for _ in range(2))
    slots = jnp.asarray(rng.permutation(300 * 32)[:2000].astype(np.int32)).at[7].set(300 * 32)
    write = functools.partial(write_kv, page_size=32, kv_dtype="int8")
    one, other = (
        np.asarray(jax.jit(functools.partial(write, backend=name))(pool, k, v, slots))
        for name in ("xla", "pallas_triton")
    )
    np.testing.assert_array_equal(one[:, 32:], other[:, 32:])
    assert np.abs(one.astype(int) - other).max() <= 1 and (one != other).mean() < 1e-4


@pytest.mark.parametrize(
    ("backend", "blocks"), [("auto", None), ("pallas_mosaic_gpu", MOSAIC_BLOCKS[2]), ("jax_triton", None)]
)
def test_pool_of_more_than_2_to_the_31_elements(backend: str, blocks: BlockSizes | None) -> None:
    """Pages are on both sides of element 2**31 and near the end; the rest of the pool is NaN."""
    num_pages, page_size, heads = 42_000, 32, Heads(40, 10, 128)
    shape = (num_pages, page_size, 2 * heads.num_kv_heads, heads.head_dim)
    assert np.prod(shape) > 2**31
    boundary = 2**31 // int(np.prod(shape[1:]))
    ids = np.array([*range(boundary - 4, boundary + 4), *range(num_pages - 8, num_pages), 0, 1], np.int32)
    rng = np.random.default_rng(9)
    rng.shuffle(ids)
    rows = [(1, 9 * page_size - 5), (30, 9 * page_size)]  # nine pages each
    page_indices = ids.reshape(2, 9)

    positions = [np.arange(kv_len) for _, kv_len in rows]
    slots = np.concatenate(
        [page_indices[i, p // page_size] * page_size + p % page_size for i, p in enumerate(positions)]
    )
    padding = np.full(7, num_pages * page_size)
    new = rng.standard_normal((2, len(slots) + len(padding), heads.num_kv_heads, heads.head_dim))
    k, v = jnp.asarray(new, jnp.bfloat16)
    pool = jax.jit(lambda: jnp.full(shape, jnp.nan, jnp.bfloat16))()
    write = jax.jit(write_kv, donate_argnums=0).lower(
        pool, k, v, np.concatenate([slots, padding]).astype(np.int32)
    )
    compiled = write.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 30  # in place
    pool = compiled(pool, k, v, np.concatenate([slots, padding]).astype(np.int32))

    num_finite = jax.jit(lambda x: jnp.isfinite(x).any(axis=(2, 3)).sum(dtype=jnp.int32))(pool)
    assert int(num_finite) == len(slots)
    small = np.asarray(pool[jnp.asarray(ids)])
    order = {int(page): i for i, page in enumerate(ids)}
    for token in range(0, len(slots), 41):
        row = small[order[int(slots[token] // page_size)], slots[token] % page_size]
        np.testing.assert_array_equal(row[0::2], np.asarray(k[token]))
        np.testing.assert_array_equal(row[1::2], np.asarray(v[token]))

    q = jnp.asarray(rng.standard_normal((31, heads.num_q_heads, heads.head_dim)), jnp.bfloat16)
    kv_lens = np.array([kv_len for _, kv_len in rows], np.int32)
    cu_q_lens, num_seqs = np.array([0, 1, 31], np.int32), np.array([2], np.int32)
    batch = Batch(q, pool, kv_lens, page_indices, cu_q_lens, num_seqs)
    out = compile_attention(batch, backend, blocks)(batch)
    # The reference on the used pages alone, renumbered.
    renumbered = np.vectorize(order.get)(page_indices).astype(np.int32)
    expected = batch._replace(kv_pages=small, page_indices=renumbered)
    assert_equals_reference(out, expected, SCALE)
