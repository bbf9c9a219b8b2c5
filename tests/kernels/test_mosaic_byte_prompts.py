"""The Mosaic kernel for prompts over pages in 8 bits, interpreted, against the dense reference."""

from __future__ import annotations

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
    build_tiles,
    byte_class,
    byte_prompt_class,
    page_shape,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.interpreted_threads import InterpretedThreads
from pallas_kernels.ragged_paged_attention.mosaic_convert import CodeRows, convert_rows
from pallas_kernels.ragged_paged_attention.mosaic_threads import MosaicThreads
from pallas_kernels.ragged_paged_attention.page_formats import Stored, decode, scale_bytes
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import Room, assert_equals_reference, make_batch, stored
from tests.kernels.cross_lower import lower_for_cuda

SCALE = 0.13
# Whole tiles and partial ones, one key and none, ends inside and at the end of pages and blocks; some are split.
ROWS = [(70, 70), (33, 200), (5, 320), (1, 1), (0, 12), (64, 128), (1, 300)]


class Memory:
    """An array that is read and written whole, as a reference is."""

    def __init__(self, array: Any) -> None:
        self.array = jnp.asarray(array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, _: Any) -> Any:
        return self.array

    def __setitem__(self, _: Any, array: Any) -> None:
        assert array.shape == self.array.shape and array.dtype == self.array.dtype
        self.array = array


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("page_size", "block_kv"), [(32, 128), (64, 64)])
def test_a_block_becomes_its_numbers(kv_dtype: str, page_size: int, block_kv: int) -> None:
    """Codes times scales, rounded once; scales of zero, of all sizes, and of no row, which are not numbers."""
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
    expected = np.asarray(decode(Stored(jnp.asarray(codes), scales), kv_dtype))
    found = np.asarray(target[...], np.float32)
    np.testing.assert_array_equal(found, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


class Places(InterpretedThreads):
    """Says where its loads and stores go, as bytes of the memory of a GPU."""

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
def test_numbers_lie_as_operands_and_no_bank_is_met_twice(block_kv: int) -> None:
    """In tiles of eight rows and 64 columns, whose bits 4 to 6 of an address are changed by bits 7 to 9."""
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


@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype", "classes"),
    [
        pytest.param(
            Heads(4, 1, 128), 32, "int8",
            (byte_class(8, 128, 2, 2, 128, 8), byte_prompt_class(128, 128, 2, 128, 8)),
            id="prompts", marks=pytest.mark.long,
        ),
        pytest.param(
            Heads(5, 1, 128), 64, "float8_e4m3fn",
            (byte_class(8, 64, 1, 3, 128, 16), byte_prompt_class(64, 128, 2, 128, 8)),
            id="few_tokens_group5", marks=pytest.mark.long,
        ),
        pytest.param(
            Heads(2, 2, 128), 32, "int8", (byte_prompt_class(128, 64, 3, 128, 8),), id="alone",
        ),
    ],
)  # fmt: skip
def test_equals_reference(
    heads: Heads, page_size: int, kv_dtype: str, classes: tuple[TileClass, ...], checked_interpreter: None
) -> None:
    batch = make_batch(np.random.default_rng(page_size), ROWS, heads, page_size=page_size, dtype="bfloat16")
    batch = stored(batch, kv_dtype)
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=page_size, dtype="bfloat16",
        backend="pallas_mosaic_gpu", blocks=BlockSizes(classes), kv_dtype=kv_dtype,
    )  # fmt: skip
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    assert tiles[len(classes)]  # something is merged

    def attend(tiles: Any, *batch: Any) -> Any:
        return ragged_paged_attention(
            *batch, sm_scale=SCALE, metadata=(spec, tiles), kv_dtype=kv_dtype, interpret=True
        )

    jitted = jax.jit(attend, compiler_options={"xla_backend_optimization_level": 0})
    out = jitted(jnp.asarray(tiles), *batch)
    assert_equals_reference(out, batch, SCALE, page_size=page_size, kv_dtype=kv_dtype)
    # As padded as can be: no rows, one without tokens, one token.
    for rows in ([], [(0, 0)], [(1, 1)]):
        room = Room(len(batch.q), len(batch.kv_lens), batch.page_indices.shape[1], len(batch.kv_pages))
        few = make_batch(np.random.default_rng(0), rows, heads, page_size=page_size, dtype="bfloat16", room=room)
        few = stored(few, kv_dtype)
        tiles = build_tiles(spec, few.cu_q_lens, few.kv_lens, few.num_seqs)
        out = jitted(jnp.asarray(tiles), *few)
        assert_equals_reference(out, few, SCALE, page_size=page_size, kv_dtype=kv_dtype)
    assert not get_races().races_found
