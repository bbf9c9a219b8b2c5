"""The Mosaic kernel for prompts over pages in 8 bits, interpreted, against the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    TileSpec,
    build_tiles,
    byte_class,
    byte_prompt_class,
    mosaic_class,
    mosaic_convert,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.interpreted_threads import InterpretedThreads
from pallas_kernels.ragged_paged_attention.mosaic_convert import CodeRows, convert_rows
from pallas_kernels.ragged_paged_attention.mosaic_threads import MosaicThreads
from pallas_kernels.ragged_paged_attention.page_formats import Stored, decode, scale_bytes
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import Batch, Room, assert_equals_reference, make_batch, stored
from tests.kernels.cross_lower import lower_byte_attention
from tests.kernels.lane_memory import Memory
from tests.seeds import EVERYTHING

SCALE = 0.13
# Whole tiles and partial ones, one key and none, ends inside and at the end of pages and blocks; splits.
ROWS = [(70, 70), (33, 200), (5, 320), (1, 1), (0, 12), (64, 128), (1, 300)]
FEW_ROWS = [(70, 70), (5, 290), (0, 12), (2, 128)]
# Batches with the most padding: no rows, a row without tokens, one token. Each takes as long as a full batch.
PADDED: list[list[tuple[int, int]]] = [[], [(0, 0)], [(1, 1)]]
ONE_TOKEN = PADDED if EVERYTHING else PADDED[-1:]


def converted(kv_dtype: str, page_size: int, block_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """Convert a block of all codes; return its numbers and the expected ones.

    Scales are zero, of all sizes, and of unused rows.
    """
    rng = np.random.default_rng(block_kv)
    codes = np.resize(np.arange(256, dtype=np.uint8), (block_kv, 128)).view(np.int8)
    codes = rng.permuted(codes, axis=1)
    if kv_dtype == "int8":
        codes[codes == -128] = 0  # which no row has
    else:
        codes[(codes & 0x7F) == 0x7F] = 0
    scales = jnp.asarray(np.exp(8 * rng.standard_normal(block_kv)), jnp.bfloat16).astype(jnp.float32)
    scales = scales.at[3].set(0).at[-1].set(jnp.nan)
    pages = np.full((block_kv // page_size, 128), -1, np.int8)
    high, low = (np.asarray(x).reshape(-1, page_size) for x in scale_bytes(scales))
    pages[:, :page_size], pages[:, page_size : 2 * page_size] = high, low
    target = Memory(jnp.full((block_kv, 128), 7, jnp.bfloat16))
    rows = CodeRows(kv_dtype, page_size, block_kv)
    convert_rows(InterpretedThreads(), rows, Memory(codes), Memory(pages), target)
    expected = np.asarray(decode(Stored(jnp.asarray(codes), scales), kv_dtype)).astype(ml_dtypes.bfloat16)
    return np.asarray(target[...], np.float32), expected.astype(np.float32)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("page_size", "block_kv"), [(32, 128), (64, 64)])
def test_a_block_is_converted_to_its_numbers(kv_dtype: str, page_size: int, block_kv: int) -> None:
    """Numbers are codes times scales, rounded once."""
    np.testing.assert_array_equal(*converted(kv_dtype, page_size, block_kv))


class Places(InterpretedThreads):
    """Threads that record the byte addresses of their loads and stores on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[np.ndarray] = []
        self.stores: list[np.ndarray] = []

    def operand_slot(self, key: Any, chunk: Any) -> Any:
        return MosaicThreads.operand_slot(self, key, chunk)  # type: ignore[arg-type]

    def load_words(self, ref: Any, start: Any) -> list[Any]:
        self.loads.append(np.asarray(start))
        return super().load_words(ref, start)

    def store_words(self, ref: Any, start: Any, values: list[Any], condition: Any = True) -> None:
        self.stores.append(np.asarray(start))
        super().store_words(ref, start, values, condition)


@pytest.mark.parametrize("block_kv", [64, 128])
def test_numbers_have_the_operand_layout_without_bank_conflicts(block_kv: int) -> None:
    """Tiles have eight rows and 64 columns; bits 4 to 6 of an address are XORed with bits 7 to 9."""
    rng, threads = np.random.default_rng(1), Places()
    codes = rng.integers(-127, 128, (block_kv, 128)).astype(np.int8)
    ones = jnp.ones(block_kv, jnp.float32)
    pages = np.zeros((block_kv // 32, 128), np.int8)
    pages[:, :32], pages[:, 32:64] = (np.asarray(x).reshape(-1, 32) for x in scale_bytes(ones))
    target = Memory(jnp.full((block_kv, 128), 7, jnp.bfloat16))
    convert_rows(threads, CodeRows("int8", 32, block_kv), Memory(codes), Memory(pages), target)
    tiles = codes.reshape(-1, 8, 2, 64).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    plain = tiles.reshape(-1, 8).view(np.int32)  # 16 bytes each
    place = np.arange(len(plain)) * 16
    expected = plain[np.argsort(place ^ (place >> 7 & 7) << 4)]
    np.testing.assert_array_equal(np.asarray(target[...]).reshape(-1, 8).view(np.int32), expected)
    for starts in (*threads.loads, *threads.stores):
        assert all(len(set(part % 128)) == 8 for part in starts.reshape(-1, 8))
    assert len(set(np.concatenate(threads.loads))) == block_kv * 8
    assert len(set(np.concatenate(threads.stores))) == block_kv * 16


def attention(
    rows: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    kv_dtype: str,
    classes: tuple[TileClass, ...],
    sm_scale: float = SCALE,
    scratch_pages: int = 0,
) -> tuple[Batch, Callable[[Batch], Any]]:
    """Return a batch of these rows, and interpreted attention for its shapes."""
    batch = make_batch(np.random.default_rng(page_size), rows, heads, page_size=page_size, dtype="bfloat16")
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=page_size, dtype="bfloat16",
        backend="pallas_mosaic_gpu", blocks=BlockSizes(classes), kv_dtype=kv_dtype,
        scratch_pages=scratch_pages,
    )  # fmt: skip
    tiles = tiles_of(spec, batch)
    assert tiles[len(classes)]  # some are merged
    assert not scratch_pages or tiles[: len(classes)].all(), "a class has no tiles"

    def attend(tiles: Any, *batch: Any) -> Any:
        return ragged_paged_attention(
            *batch, sm_scale=sm_scale, metadata=(spec, tiles), kv_dtype=kv_dtype, interpret=True
        )

    jitted = jax.jit(attend, compiler_options={"xla_backend_optimization_level": 0})

    def run(batch: Batch) -> Any:
        return jitted(jnp.asarray(tiles_of(spec, batch)), *batch)

    return stored(batch, kv_dtype), run


def tiles_of(spec: TileSpec, batch: Batch) -> np.ndarray:
    return build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs, None, batch.page_indices)


@pytest.mark.parametrize(
    ("scratch_pages", "page_size", "kv_dtype"),
    [(4, 32, "int8"), (7, 32, "int8"), (9, 64, "int8")],
)
@pytest.mark.long
@pytest.mark.usefixtures("checked_interpreter")
def test_decoded_pages_beside_codes(scratch_pages: int, page_size: int, kv_dtype: str) -> None:
    """The prompts of 70 and 64 tokens have enough tiles of 16; in four pages only the first fits."""
    classes = (
        byte_class(8, 64, 1, 3, 128, 8),
        byte_prompt_class(64, 64, 2, 128, 8),
        mosaic_class(128, 64, 2, 64, 8),
    )  # fmt: skip
    heads = Heads(8, 1, 128)
    batch, attend = attention(ROWS, heads, page_size, kv_dtype, classes, scratch_pages=scratch_pages)
    assert_equals_reference(attend(batch), batch, SCALE, page_size=page_size, kv_dtype=kv_dtype)
    room = Room(len(batch.q), len(batch.kv_lens), batch.page_indices.shape[1], len(batch.kv_pages))
    few = make_batch(
        np.random.default_rng(0), [(1, 1)], heads, page_size=page_size, dtype="bfloat16", room=room
    )
    few = stored(few, kv_dtype)
    assert_equals_reference(attend(few), few, SCALE, page_size=page_size, kv_dtype=kv_dtype)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("rows", "heads", "page_size", "kv_dtype", "classes", "padded"),
    [
        pytest.param(
            FEW_ROWS, Heads(2, 1, 128), 32, "int8", (byte_prompt_class(128, 64, 3, 128, 4),), PADDED,
            id="alone",
        ),
        pytest.param(
            ROWS, Heads(4, 1, 128), 32, "int8",
            (byte_class(8, 128, 2, 2, 128, 8), byte_prompt_class(128, 64, 2, 128, 8)),
            ONE_TOKEN,
            id="beside_decoding",
        ),
        pytest.param(
            FEW_ROWS, Heads(5, 1, 128), 64, "float8_e4m3fn",
            (byte_class(8, 64, 1, 3, 128, 16), byte_prompt_class(64, 128, 2, 128, 8)),
            ONE_TOKEN,
            id="group5",
        ),
    ],
)  # fmt: skip
@pytest.mark.long  # in seconds: blocks that become numbers, scales that are wrong, and that it lowers
@pytest.mark.usefixtures("checked_interpreter")
def test_equals_reference(
    rows: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    kv_dtype: str,
    classes: tuple[TileClass, ...],
    padded: list[list[tuple[int, int]]],
) -> None:
    batch, attend = attention(rows, heads, page_size, kv_dtype, classes)
    assert_equals_reference(attend(batch), batch, SCALE, page_size=page_size, kv_dtype=kv_dtype)
    for few_rows in padded:
        room = Room(len(batch.q), len(batch.kv_lens), batch.page_indices.shape[1], len(batch.kv_pages))
        rng = np.random.default_rng(0)
        few = make_batch(rng, few_rows, heads, page_size=page_size, dtype="bfloat16", room=room)
        few = stored(few, kv_dtype)
        assert_equals_reference(attend(few), few, SCALE, page_size=page_size, kv_dtype=kv_dtype)
    assert not get_races().races_found


@pytest.mark.long
@pytest.mark.usefixtures("checked_interpreter")
def test_a_neighbours_scale_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug gives odd keys and values the scale of the one before."""
    scale_of = mosaic_convert._scale_of
    monkeypatch.setattr(mosaic_convert, "_scale_of", lambda *args: scale_of(*args[:-1], args[-1] & -2))
    scale = SCALE / 2  # unlike in other tests, whose kernels are cached
    sizes = Heads(2, 1, 128), 32, "int8", (byte_prompt_class(128, 64, 3, 128, 4),)
    batch, attend = attention(FEW_ROWS, *sizes, scale)
    with pytest.raises(AssertionError):
        assert_equals_reference(attend(batch), batch, scale, page_size=32, kv_dtype="int8")


@pytest.mark.parametrize(("wrong", "matters"), [("next_key", True), ("no_scale", True), ("nothing", False)])
def test_wrong_scales_of_a_block_show(wrong: str, matters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_of = mosaic_convert._scale_of

    def mistaken(threads: Any, rows: CodeRows, scales: Any, key: Any) -> Any:
        found = scale_of(threads, rows, scales, key ^ 1 if wrong == "next_key" else key)
        return found * 0 + 1 if wrong == "no_scale" else found

    monkeypatch.setattr(mosaic_convert, "_scale_of", mistaken)
    found, expected = converted("int8", 32, 64)
    assert np.array_equal(found, expected, equal_nan=True) != matters


SERVED: dict[str, Any] = {
    "max_num_seqs": 64, "num_q_heads": 40, "num_kv_heads": 10, "head_dim": 128, "page_size": 32,
    "dtype": "bfloat16", "backend": "pallas_mosaic_gpu", "kv_dtype": "int8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "changed"),
    [
        ((byte_prompt_class(128, 128, 2, 1024, 264),), {"kv_dtype": None}),
        ((byte_prompt_class(128, 128, 2, 1024, 264),), {"backend": "pallas_triton"}),
        ((byte_prompt_class(128, 128, 2, 1024, 264),), {"page_size": 16}),
        ((byte_prompt_class(128, 32, 2, 1024, 264),), {}),
        ((byte_prompt_class(32, 128, 2, 1024, 264),), {}),
        ((byte_prompt_class(64, 128, 2, 256, 264), TileClass(128, 64, 8, 3, 1024, 528)), {}),
    ],
    ids=["no_bytes", "backend", "page", "keys", "rows", "order"],
)
def test_unsupported_arguments_are_refused(classes: tuple[TileClass, ...], changed: dict[str, Any]) -> None:
    with pytest.raises(AttentionArgumentError, match="blocks"):
        tile_spec(num_tokens=512, **SERVED | changed, blocks=BlockSizes(classes))


BUCKETS = [
    pytest.param(
        num_tokens, Heads(40, 10, 128), 32, "int8", None, 700,
        marks=() if num_tokens == 2048 else pytest.mark.long,
    )
    for num_tokens in (32, 64, 128, 256, 512, 1024, 2048)
]  # fmt: skip


@pytest.mark.parametrize(
    ("num_tokens", "heads", "page_size", "kv_dtype", "classes", "scratch_pages"),
    [
        *BUCKETS,
        pytest.param(2048, Heads(16, 1, 128), 64, "float8_e4m3fn", None, 700, marks=pytest.mark.long),
        pytest.param(2048, Heads(40, 8, 128), 32, "float8_e4m3fn", None, 0, marks=pytest.mark.long),
        pytest.param(256, Heads(40, 40, 128), 64, "int8", None, 0, marks=pytest.mark.long),
        pytest.param(
            2048, Heads(40, 10, 128), 32, "int8", (byte_prompt_class(128, 64, 3, 1024, 264),), 0,
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_lowers_for_an_h200(
    num_tokens: int,
    heads: Heads,
    page_size: int,
    kv_dtype: str,
    classes: tuple[TileClass, ...] | None,
    scratch_pages: int,
) -> None:
    """Each class is a Mosaic kernel; the merge and the decoding of pages are Triton's."""
    max_num_seqs = 64
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=128, page_size=page_size, dtype="bfloat16",
        backend="pallas_mosaic_gpu", kv_dtype=kv_dtype,
        blocks=None if classes is None else BlockSizes(classes), scratch_pages=scratch_pages,
    )  # fmt: skip
    assert (spec.scratch_pages > 0) == (scratch_pages > 0 and num_tokens > 256)
    assert spec.blocks.classes[-1].rows == (64 if num_tokens <= 256 else 128)

    text = lower_byte_attention(spec, heads)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == len(spec.blocks.classes)
    assert text.count("xla.gpu.triton") == 1 + (spec.scratch_pages > 0)


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "has_sinks"),
    [
        (Heads(40, 10, 128), "int8", False),
        pytest.param(Heads(64, 8, 128), "float8_e4m3fn", True, marks=pytest.mark.long),
        pytest.param(Heads(16, 1, 128), "int8", True, marks=pytest.mark.long),
    ],
)
def test_windows_and_sinks_lower_for_an_h200(heads: Heads, kv_dtype: str, has_sinks: bool) -> None:
    spec = tile_spec(
        num_tokens=2048, max_num_seqs=64, num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads,
        head_dim=128, page_size=32, dtype="bfloat16", backend="pallas_mosaic_gpu", kv_dtype=kv_dtype,
        scratch_pages=700, window=4096,
    )  # fmt: skip
    text = lower_byte_attention(spec, heads, has_sinks=has_sinks)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == len(spec.blocks.classes) == 3
