"""The lane program for pages in 8 bits, computed for all lanes: fragments, codes, softmax, merge."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import mosaic_byte_lanes as lanes
from pallas_kernels.ragged_paged_attention.interpreted_threads import InterpretedThreads
from pallas_kernels.ragged_paged_attention.page_formats import Stored, decode, scale_bytes
from tests.kernels.lane_memory import Memory
from tests.kernels.planting import plant

THREADS = InterpretedThreads()


def words_of(codes: np.ndarray) -> Any:
    """Convert u8[512] to i32[128]."""
    return jnp.asarray(codes.reshape(128, 4).view(np.int32)[:, 0])


def halves(word: Any) -> np.ndarray:
    return np.asarray(word).view(np.float16).reshape(-1, 2)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_code_becomes_its_number(kv_dtype: str) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 2)
    shape = lanes.LaneShape(kv_dtype, 32, 4, 128, 1, 1.0)
    found = np.concatenate([halves(x) for x in lanes._halves(THREADS, shape, words_of(codes))], axis=1)
    numbers = codes.view(np.int8 if kv_dtype == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(found.ravel().astype(np.float32), numbers)


def test_the_fragments_are_those_of_a_product() -> None:
    """They are PTX's for mma.m16n8k16, written out element by element."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((4, 16, n)).astype(np.float16) for n in (16, 8))
    c = rng.standard_normal((4, 16, 8)).astype(np.float32)
    fragments: dict[str, np.ndarray] = {
        "a": np.zeros((4, 128, 2), np.float16), "b": np.zeros((2, 128, 2), np.float16),
        "c": np.zeros((4, 128), np.float32),
    }  # fmt: skip
    where = np.zeros((4, 128, 3), int)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        group, in_group = lane >> 2, lane % 4
        for i in range(8):  # of a
            row = group + 8 * (i in (2, 3, 6, 7))
            fragments["a"][i // 2, thread, i % 2] = a[warp, row, in_group * 2 + (i & 1) + 8 * (i >= 4)]
        for i in range(4):
            row = in_group * 2 + (i & 1) + 8 * (i >= 2)
            fragments["b"][i // 2, thread, i % 2] = b[warp, row, group]
            where[i, thread] = warp, group + 8 * (i >= 2), in_group * 2 + (i & 1)
            fragments["c"][i, thread] = c[tuple(where[i, thread])]
    packed = {k: [jnp.asarray(x.view(np.int32)[:, 0]) for x in fragments[k]] for k in "ab"}
    found = THREADS.multiply_add(packed["a"], packed["b"], [jnp.asarray(x) for x in fragments["c"]])
    expected = c + a.astype(np.float32) @ b.astype(np.float32)
    for i in range(4):
        np.testing.assert_allclose(found[i], expected[tuple(where[i].T)], rtol=1e-5, atol=1e-5)


def test_a_transposition_gives_the_second_operand() -> None:
    rng = np.random.default_rng(1)
    matrices = rng.standard_normal((4, 8, 8)).astype(np.float16)
    given = matrices.reshape(128, 2).view(np.int32)[:, 0]  # lane 4 g + t: row g, columns 2 t and + 1
    expected = matrices.swapaxes(1, 2).reshape(128, 2)
    np.testing.assert_array_equal(halves(THREADS.transpose(jnp.asarray(given))), expected)


def test_swizzled_loads_have_no_bank_conflicts() -> None:
    """Eight lanes at a time read 16 bytes each from all 32 banks, for keys and for values."""
    lane = np.arange(32)
    t, g = lane % 4, lane // 4
    row, first, second = lanes.key_of(g), lanes.key_of(2 * t), lanes.key_of(2 * t + 1)
    assert sorted(row[::4]) == list(range(8)) and sorted({*first, *second}) == list(range(8))
    cases = [(row, 0, t), (row + 8, 0, t + 4), (first, 1, g), (second, 1, g), (second + 8, 1, g)]
    for key, which, chunk in cases:
        slots = lanes.slot_of(key, which, chunk)
        assert (slots % 16 == 0).all() and len(set(slots)) == 32
        for first in range(0, 32, 8):
            assert len(set(slots[first : first + 8] % 128)) == 8
    # As TMA does: bits 4 to 6 of an address are those of the chunk, XORed with bits 7 to 9.
    plain = np.arange(64)[:, None] * 128 + np.arange(8) * 16
    swizzled = plain ^ ((plain >> 7 & 7) << 4)
    rows = [lanes.slot_of(np.arange(32)[:, None], which, np.arange(8)) for which in range(2)]
    np.testing.assert_array_equal(np.stack(rows, axis=1).reshape(64, 8), swizzled)


def attend(
    shape: lanes.LaneShape,
    q: np.ndarray,
    stored: list[Stored],
    first: int,
    position: int,
    kv_end: int,
    sinks: list[float] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows in bfloat16 and float32, and log-sum-exps; keys and values [num_blocks * block_kv, 128]."""
    num_rows, page = lanes.TILE_ROWS * shape.num_tiles, shape.page_size
    numbers = jnp.int32(position), jnp.int32(kv_end)
    queries = lanes.load_queries(THREADS, shape, Memory(jnp.asarray(q, jnp.bfloat16)), *numbers)
    sums = [jnp.full(128, x, jnp.float32) for x in lanes.empty_sums(shape)]
    assert len(queries) == shape.num_query_registers and len(sums) == shape.num_sum_registers
    for block in reversed(range(len(stored[0].codes) // shape.block_kv)):
        keys = slice(block * shape.block_kv, (block + 1) * shape.block_kv)
        scales = np.full((shape.block_kv // page, 2, 128), -1, np.int8)
        for which in range(2):
            high, low = (np.asarray(x).reshape(-1, page) for x in scale_bytes(stored[which].scales[keys]))
            scales[:, which, :page], scales[:, which, page : 2 * page] = high, low
        codes = Memory(jnp.concatenate([part.codes[keys] for part in stored], axis=1))
        last = first + (block + 1) * shape.block_kv
        last_token = position + (num_rows - 1) // shape.group
        has_hidden = shape.window is not None and first + keys.start <= last_token - shape.window
        sums = lanes.add_block(
            THREADS, shape, codes, Memory(scales.reshape(-1, 256)), jnp.int32(first + keys.start), queries,
            sums, masked=last > min(position + 1, kv_end) or has_hidden,
        )  # fmt: skip
    rows, slabs = Memory(jnp.zeros((4, 2, num_rows))), Memory(jnp.full((2, num_rows, 128), jnp.nan))
    result, lse = Memory(jnp.zeros((num_rows, 128), jnp.bfloat16)), Memory(jnp.zeros(num_rows))
    of_heads = [jnp.float32(sink) for sink in sinks or ()]
    lanes.finish(THREADS, shape, rows, slabs, result, lse, sums, of_heads)
    return np.asarray(result[...], np.float32), np.asarray(slabs[...][0]), np.asarray(lse[...])


def check_tile(shape: lanes.LaneShape, position: int, kv_end: int, sinks: list[float] | None = None) -> None:
    """Compare a tile with float64; slots that no query sees hold garbage, and scales differ widely.

    `sinks` are those of the heads above the largest score of the first token.
    """
    kv_dtype, group, block_kv, window = shape.kv_dtype, shape.group, shape.block_kv, shape.window
    rng = np.random.default_rng(group)
    first, num_rows = 128, 8 * shape.num_tiles
    num_keys = -(-(kv_end - first) // block_kv) * block_kv
    large = np.where(np.arange(128) == 5, 40, 1)
    q = np.asarray(jnp.asarray(rng.standard_normal((num_rows, 128)) * 3 * large, jnp.bfloat16), np.float64)
    seen = slice(max(position + 1 - window - first, 0) if window else 0, kv_end - first)
    is_hidden = np.ones(num_keys, bool)
    is_hidden[seen] = False
    stored, numbers = [], []
    for _ in range(2):
        codes = rng.integers(-127, 128, (num_keys, 128)).astype(np.int8)
        if kv_dtype != "int8":
            floats = (rng.standard_normal((num_keys, 128)) * 40).astype(ml_dtypes.float8_e4m3fn)
            codes = floats.view(np.int8)
        sizes = np.exp(rng.standard_normal(num_keys)) / 60
        scales = np.array(jnp.asarray(jnp.asarray(sizes, jnp.bfloat16), jnp.float32))
        scales[seen.start + 7] = 0
        scales[is_hidden] = np.where(np.arange(num_keys) % 3, np.nan, np.inf)[is_hidden]
        codes[is_hidden] = -1
        stored.append(Stored(jnp.asarray(codes), jnp.asarray(scales)))
        numbers.append(np.asarray(decode(stored[-1], kv_dtype), np.float64)[seen])
    distance = (position + np.arange(num_rows) // group)[:, None] - (first + np.arange(num_keys)[seen])
    visible = (distance >= 0) & (distance < (window or kv_end))
    scores = np.where(visible, q @ numbers[0].T * shape.scale, -np.inf)
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp2(scores - largest)
    total = weights.sum(axis=1, keepdims=True)
    whole = total
    if sinks is not None:
        sinks = [float(np.float32(a + b)) for a, b in zip(sinks, largest[:group, 0], strict=True)]
        with np.errstate(over="ignore"):
            whole = total + np.exp2(np.resize(sinks, num_rows)[:, None] - largest)
    result, parts, lse = attend(shape, q, stored, first, position, kv_end, sinks)
    expected = weights @ numbers[1] / whole
    np.testing.assert_allclose(parts, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    np.testing.assert_allclose(result, parts, rtol=2**-8)
    np.testing.assert_allclose(lse, (largest + np.log2(total))[:, 0], atol=1e-3)


SCALE = 0.1 * 1.442695


@pytest.mark.parametrize(
    ("kv_dtype", "group", "page_size", "block_kv", "num_tiles", "position", "kv_end"),
    [
        pytest.param("int8", 4, 32, 128, 1, 383, 384, marks=pytest.mark.long),
        pytest.param("int8", 5, 64, 128, 1, 300, 301, marks=pytest.mark.long),
        pytest.param("int8", 16, 32, 64, 2, 130, 131, marks=pytest.mark.long),
        pytest.param("int8", 1, 32, 128, 1, 290, 298, marks=pytest.mark.long),
        ("float8_e4m3fn", 4, 32, 128, 1, 257, 259),
        pytest.param("float8_e4m3fn", 8, 64, 64, 1, 200, 201, marks=pytest.mark.long),
    ],
)
def test_attention_of_a_tile(
    kv_dtype: str, group: int, page_size: int, block_kv: int, num_tiles: int, position: int, kv_end: int
) -> None:
    check_tile(lanes.LaneShape(kv_dtype, page_size, group, block_kv, num_tiles, SCALE), position, kv_end)


@pytest.mark.parametrize(
    ("kv_dtype", "group", "num_tiles", "window"),
    [
        ("float8_e4m3fn", 4, 1, 33),
        pytest.param("int8", 4, 1, 40, marks=pytest.mark.long),
        pytest.param("int8", 1, 1, 20, marks=pytest.mark.long),
        pytest.param("float8_e4m3fn", 16, 2, 100, marks=pytest.mark.long),
    ],
)
def test_a_tile_with_a_window_and_sinks(kv_dtype: str, group: int, num_tiles: int, window: int) -> None:
    """Pages before the window hold garbage, as do slots past the range."""
    shape = lanes.LaneShape(kv_dtype, 32, group, 64, num_tiles, SCALE, window)
    check_tile(shape, 257, 257 + 8 * num_tiles // group, [float(x) for x in np.resize([-9, 0, 9], group)])


BUGS = {
    "a key too many": ("load_queries", "token - shape.window", "token - shape.window - 1"),
    "a key too few": ("load_queries", "token - shape.window", "token - shape.window + 1"),
    "values before the window": ("add_block", "hidden_key + 1 - first_key", "first_key * 0"),
    "the sink of another head": ("_sink_of", "head == other", "head < 0"),
    "a sink in the log-sum-exp": ("_factors", "whole = total +", "total = whole = total +"),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lanes, *BUGS[name])
    shape = lanes.LaneShape("float8_e4m3fn", 32, 4, 64, 1, SCALE, 33)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_tile(shape, 257, 259, [-9.0, 0.0, 9.0, 0.0])


def test_a_tile_without_keys_is_zero() -> None:
    shape = lanes.LaneShape("int8", 32, 4, 128, 1, 0.1)
    none = Stored(jnp.zeros((0, 128), jnp.int8), jnp.zeros(0))
    result, parts, _ = attend(shape, np.full((8, 128), np.nan), [none, none], 0, -3, 0)
    assert not result.any() and not parts.any()
