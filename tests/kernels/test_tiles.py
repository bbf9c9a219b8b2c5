"""The tile list against a brute-force check of what it must cover."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    TileSpec,
    build_tiles,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention import tile_lists as fields
from pallas_kernels.ragged_paged_attention.block_sizes import MAX_NUM_SPLITS, MERGE_ROWS
from pallas_kernels.ragged_paged_attention.metadata import build_tiles_traced
from pallas_kernels.ragged_paged_attention.mosaic_launch import NUM_PROGRAMS
from pallas_kernels.ragged_paged_attention.tile_specs import HEADER_LEN, NUM_DECODED, NUM_FIELDS
from tests.kernels.planting import plant

TWO = BlockSizes((TileClass(16, 64, 4, 3, 128, 40), TileClass(64, 32, 4, 3, 256, 20)))
ONE = BlockSizes((TileClass(32, 64, 4, 3, 128, 40),))
FILLING = BlockSizes((TileClass(16, 64, 4, 3, 128, 40), TileClass(64, 32, 4, 3, 64, 264, fills_rounds=True)))


def spec_for(
    num_tokens: int,
    max_num_seqs: int,
    blocks: BlockSizes | None,
    heads: tuple[int, int] = (8, 2),
    window: int | None = None,
) -> TileSpec:
    spec = tile_spec(
        num_tokens=num_tokens,
        max_num_seqs=max_num_seqs,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=64,
        page_size=32,
        dtype="bfloat16",
        backend="pallas_triton",
        blocks=blocks,
    )
    return replace(spec, window=window)


def draw(rng: np.random.Generator, spec: TileSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_rows = int(rng.integers(0, spec.max_num_seqs + 1))
    cu = np.full(spec.max_num_seqs + 1, 10**6, np.int32)
    kv_lens = np.full(spec.max_num_seqs, 10**6, np.int32)
    cu[0] = 0
    for row in range(num_rows):
        left = spec.num_tokens - cu[row]
        q_len = int(rng.integers(0, min(left, rng.choice([1, 8, 100, 1000])) + 1))
        cu[row + 1] = cu[row] + q_len
        kv_lens[row] = q_len + rng.integers(0, rng.choice([2, 100, 5000]))
    return cu, kv_lens, np.array([num_rows], np.int32)


def check(
    spec: TileSpec,
    tiles: np.ndarray,
    cu: np.ndarray,
    kv_lens: np.ndarray,
    num_seqs: np.ndarray,
    page_indices: np.ndarray | None = None,
) -> None:
    """Check that every (query token, key) pair is in exactly one tile, and every split is merged once.

    With a window, keys before the block in which that of the tile's first token begins are in no tile. With a
    scratch pool, the tiles of its class find their row's pages in it.
    """
    num_rows, num_classes = int(num_seqs[0]), len(spec.blocks.classes)
    covered: dict[int, list[tuple[int, int]]] = {}
    first_keys: dict[int, int] = {}
    slots: dict[tuple[int, int], tuple[int, int]] = {}
    merged: dict[int, set[int]] = {}
    for index, tile_class in enumerate(spec.blocks.classes):
        count, has_pseudo_row = tiles[index], False
        assert count <= spec.max_num_tiles[index]
        for tile in tiles[spec.tiles_offset(index) :][: count * NUM_FIELDS].reshape(-1, NUM_FIELDS):
            row, token, num_tokens, position, begin, end, slot, _ = tile.tolist()
            assert 0 < num_tokens * spec.group <= tile_class.rows
            for t in range(token, token + num_tokens):
                covered.setdefault(t, []).append((begin, end))
                first_key = 0 if spec.window is None else max(position + 1 - spec.window, 0)
                first_keys[t] = first_key - first_key % tile_class.block_kv
            if token >= cu[num_rows]:  # the pseudo row
                assert (row, begin, end, slot) == (0, 0, 0, -1)
                has_pseudo_row = True
                continue
            assert not has_pseudo_row, (
                "tiles without keys come last: `mosaic_convert` waits for the next keys"
            )
            if page_indices is not None and index == num_classes - 1:
                base, row = row, int(np.searchsorted(cu[: num_rows + 1], token, side="right")) - 1
                first = 0 if spec.window is None else max(position + 1 - spec.window, 0) // spec.page_size
                check_scratch(spec, tiles, base + first, page_indices[row, first : -(-end // spec.page_size)])
            assert cu[row] <= token and token + num_tokens <= cu[row + 1]
            assert position == kv_lens[row] - (cu[row + 1] - token)
            assert begin % tile_class.block_kv == 0 and begin < end <= position + num_tokens
            if slot >= 0:
                assert slot < spec.max_num_slots[index] and (index, slot) not in slots
                slots[index, slot] = (token, num_tokens)
    assert sorted(covered) == list(range(spec.num_tokens))
    for t, ranges in covered.items():
        ranges.sort()
        row = int(np.searchsorted(cu[: num_rows + 1], t, side="right")) - 1
        if row < num_rows:
            last = kv_lens[row] - (cu[row + 1] - t)
            assert ranges[0][0] == first_keys[t] and ranges[-1][1] > last and len(ranges) <= MAX_NUM_SPLITS
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
    merges = tiles[spec.tiles_offset(num_classes) :][: NUM_FIELDS * spec.max_num_merges]
    merges = merges.reshape(-1, NUM_FIELDS)
    assert tiles[num_classes] <= len(merges) == spec.max_num_merges
    used: set[tuple[int, int]] = set()
    for merge in merges[: tiles[num_classes]]:
        token, num_tokens, partial, num_splits, class_rows, first_row, _, _ = merge.tolist()
        begins = [spec.partial_begin(i) for i in range(num_classes)]
        index = int(np.searchsorted(begins, partial, side="right")) - 1
        assert class_rows == spec.blocks.classes[index].rows
        slot, rest = divmod(partial - spec.partial_begin(index), spec.num_kv_heads * class_rows)
        assert rest == 0 and num_splits >= 2 and first_row not in merged.setdefault(token, set())
        merged[token].add(first_row)
        for s in range(slot, slot + num_splits):
            assert slots[index, s] == (token, num_tokens)
            used.add((index, s))
    assert used == set(slots)
    for token, num_tokens in slots.values():
        assert merged[token] == set(range(0, num_tokens * spec.group, MERGE_ROWS))


@pytest.mark.parametrize("blocks", [TWO, ONE, FILLING, None], ids=["two", "one", "filling", "default"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_covers_everything_once(blocks: BlockSizes | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = [(8, 2), (40, 40), (6, 2), (64, 8)][int(rng.integers(4))]
    spec = spec_for(int(rng.integers(1, 700)), int(rng.integers(1, 40)), blocks, heads)
    batch = draw(rng, spec)
    out = np.full(spec.tiles_len, -7, np.int32)
    assert build_tiles(spec, *batch, out=out) is out
    check(spec, out, *batch)


@pytest.mark.parametrize("blocks", [TWO, ONE, FILLING, None], ids=["two", "one", "filling", "default"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), window=st.one_of(st.integers(1, 200), st.integers(1, 6000)))
def test_covers_the_windows_once(blocks: BlockSizes | None, seed: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    heads = [(8, 2), (40, 40), (6, 2), (64, 8)][int(rng.integers(4))]
    spec = spec_for(int(rng.integers(1, 700)), int(rng.integers(1, 40)), blocks, heads, window)
    batch = draw(rng, spec)
    check(spec, build_tiles(spec, *batch), *batch)


FIRST_KEY = "position - (spec.window - 1)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (FIRST_KEY, "position + num_tokens - spec.window"),
        (FIRST_KEY, "position - spec.window"),
        (FIRST_KEY, "position - (spec.window - 2)"),
        ("kv_first.take(tile) + kv_begin", "kv_begin"),
        ("num_keys = kv_end - kv_first", "num_keys = kv_end - kv_first - 1"),
    ],
    ids=["the last token's", "a key too many", "a key too few", "parts from key 0", "a key not counted"],
)
def test_planted_bugs_show(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fields, "_class_lists", old, new)
    with pytest.raises(AssertionError):
        for seed in range(20):
            rng = np.random.default_rng(seed)
            spec = spec_for(300, 20, TWO, window=int(rng.integers(1, 400)))
            batch = draw(rng, spec)
            check(spec, build_tiles(spec, *batch), *batch)


@pytest.mark.parametrize("blocks", [TWO, FILLING], ids=["two", "filling"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_window_of_all_keys_leaves_the_list_as_it_is(blocks: BlockSizes, seed: int) -> None:
    spec = spec_for(400, 20, blocks)
    batch = draw(np.random.default_rng(seed), spec)
    kv_lens, num_seqs = batch[1], int(batch[2][0])
    windowed = replace(spec, window=int(kv_lens[:num_seqs].max(initial=1)))
    np.testing.assert_array_equal(build_tiles(spec, *batch), build_tiles(windowed, *batch))


@pytest.mark.parametrize(
    ("blocks", "window"),
    [
        *((blocks, None) for blocks in (TWO, ONE, FILLING)),
        (TWO, 33),
        pytest.param(ONE, 1, marks=pytest.mark.long),
        pytest.param(FILLING, 130, marks=pytest.mark.long),
        (FILLING, 3000),
    ],
    ids=["two", "one", "filling", "two-33", "one-1", "filling-130", "filling-3000"],
)
def test_host_and_device_builders_agree(blocks: BlockSizes, window: int | None) -> None:
    spec = spec_for(400, 20, blocks, window=window)
    traced = jax.jit(lambda *batch: build_tiles_traced(spec, *batch))
    for seed in range(20):
        batch = draw(np.random.default_rng(seed), spec)
        host, device = build_tiles(spec, *batch), np.array(traced(*batch))
        check(spec, device, *batch)
        for index, count in enumerate(host[: len(blocks.classes) + 1]):
            part = slice(spec.tiles_offset(index), spec.tiles_offset(index) + count * NUM_FIELDS)
            np.testing.assert_array_equal(host[part], device[part], err_msg=f"seed {seed}, list {index}")


def test_worst_cases_fit() -> None:
    """All rows are just too long for the small class; one row has all tokens; one token each; no rows."""
    spec = spec_for(512, 64, TWO)
    for q_len, num_rows in ((5, 64), (512, 1), (1, 64), (8, 64), (0, 0), (0, 64)):
        cu = np.zeros(65, np.int32)
        cu[: num_rows + 1] = np.arange(num_rows + 1) * q_len
        kv_lens = np.full(64, 131072, np.int32)
        num_seqs = np.array([num_rows], np.int32)
        check(spec, build_tiles(spec, cu, kv_lens, num_seqs), cu, kv_lens, num_seqs)


def test_widest_tiles_come_first() -> None:
    spec = spec_for(64, 64, ONE)
    kv_lens = np.arange(1, 65, dtype=np.int32) * 64
    tiles = build_tiles(spec, np.arange(65, dtype=np.int32), kv_lens, np.array([64], np.int32))
    rows = tiles[HEADER_LEN:][: tiles[0] * NUM_FIELDS].reshape(-1, NUM_FIELDS)
    widths = rows[:, fields.KV_END] - rows[:, fields.KV_BEGIN]
    assert (np.diff(-(-widths // 64)) <= 0).all()


@pytest.mark.parametrize("num_classes", [1, 2])
@pytest.mark.parametrize("num_keys", [32_768 * 16, 40_000 * 16])
def test_ranges_of_more_than_2_to_the_15_blocks(num_keys: int, num_classes: int) -> None:
    """Their tiles come before those with fewer keys or none, and before the padding."""
    classes = (TileClass(16, 16, 4, 3, 256, 40), TileClass(64, 16, 4, 3, 2**21, 8))
    spec = spec_for(600, 4, BlockSizes(classes[-num_classes:]))
    batch = (np.array([0, 400, 500, 500, 500]), np.array([num_keys, 5000, 0, 0]), np.array([2]))
    batch = tuple(array.astype(np.int32) for array in batch)
    host = build_tiles(spec, *batch)
    device = np.array(jax.jit(lambda *batch: build_tiles_traced(spec, *batch))(*batch))
    used = spec.tiles_offset(num_classes - 1)
    for tiles in (host, device):
        check(spec, tiles, *batch)
        rows = tiles[used:][: tiles[num_classes - 1] * NUM_FIELDS].reshape(-1, NUM_FIELDS)
        widths = rows[:, fields.KV_END] - rows[:, fields.KV_BEGIN]
        assert widths.max() > num_keys - 64, "a range was split, and the test is of shorter ones"
    np.testing.assert_array_equal(host[used:][: rows.size], device[used:][: rows.size])


@pytest.mark.parametrize("lens", [[2048] * 4, [3000, 700, 2048, 2400, 65, 0]])
def test_prompts_come_row_by_row_and_are_dealt_evenly(lens: list[int]) -> None:
    """The longest row is first; dealt as in the Mosaic kernel, programs differ by at most 5% of blocks."""
    spec = tile_spec(
        num_tokens=8313, max_num_seqs=8, num_q_heads=40, num_kv_heads=40, head_dim=128, page_size=32,
        dtype="bfloat16", backend="pallas_mosaic_gpu",
    )  # fmt: skip
    cu = np.full(9, sum(lens), np.int32)
    cu[: len(lens) + 1] = np.cumsum([0, *lens])
    kv_lens = np.array(lens + [0] * (8 - len(lens)), np.int32)
    flat = np.asarray(build_tiles(spec, cu, kv_lens, np.array([len(lens)], np.int32)))
    index, block_kv = len(spec.blocks.classes) - 1, spec.blocks.classes[-1].block_kv
    tiles = flat[spec.tiles_offset(index) :][: flat[index] * NUM_FIELDS].reshape(-1, NUM_FIELDS)
    widths = -(-np.maximum(tiles[:, fields.KV_END] - tiles[:, fields.KV_BEGIN], 0) // block_kv)
    rows = [row for row, width in zip(tiles[:, fields.ROW].tolist(), widths, strict=True) if width > 1]
    in_turn = [row for i, row in enumerate(rows) if i == 0 or row != rows[i - 1]]
    assert len(set(in_turn)) == len(in_turn), "a row comes back"
    assert [lens[row] for row in in_turn] == sorted((n for n in lens if n > 128), reverse=True)
    items = np.repeat(widths, spec.num_kv_heads)
    items = np.pad(items, (0, -len(items) % (2 * NUM_PROGRAMS))).reshape(-1, 2, NUM_PROGRAMS)
    loads = (items[:, 0] + items[:, 1, ::-1]).sum(axis=0)
    assert loads.max() < 1.05 * loads.mean()


def check_scratch(spec: TileSpec, tiles: np.ndarray, base: int, pages: np.ndarray) -> None:
    """Check that a table which begins at `base` names scratch pages into which `pages` are decoded."""
    assert spec.table_offset <= base and base + len(pages) <= len(tiles)
    places = tiles[base : base + len(pages)]
    assert places.max() < tiles[NUM_DECODED] <= spec.scratch_pages
    np.testing.assert_array_equal(tiles[spec.decoded_offset + places], pages)


@pytest.mark.parametrize("capacity", [1, 60, 400])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_long_rows_read_decoded_pages(capacity: int, seed: int) -> None:
    """Rows share pages; what fits is decoded once, and everything else is left to the other kernel."""
    rng = np.random.default_rng(seed)
    num_tokens, heads = int(rng.integers(257, 1500)), int(rng.choice([4, 10]))
    spec = byte_spec(num_tokens, 12, capacity, heads)
    check_decoded_pages(rng, spec, capacity)


@pytest.mark.parametrize("capacity", [60, 400])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), window=st.one_of(st.integers(1, 200), st.integers(1, 3000)))
def test_long_rows_with_a_window_read_decoded_pages(capacity: int, seed: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    spec = byte_spec(int(rng.integers(257, 1500)), 12, capacity, int(rng.choice([4, 10])))
    check_decoded_pages(rng, replace(spec, window=window), capacity)


def test_pages_before_a_window_are_not_decoded() -> None:
    """Also where the row's pages would begin before the flat array."""
    spec = replace(byte_spec(512, 12, 60), window=300)
    kv_len = 400_000
    pages = np.arange(1, 12_501, dtype=np.int32)[None].repeat(12, axis=0)
    tiles = build_tiles(spec, np.array([0, 500]), np.array([kv_len]), 1, None, pages)
    decoded = tiles[spec.decoded_offset :][: tiles[NUM_DECODED]]
    np.testing.assert_array_equal(decoded, np.arange((kv_len - 500 - 299) // 32, kv_len // 32) + 1)
    table = tiles[spec.tiles_offset(2) :][: tiles[2] * NUM_FIELDS].reshape(-1, NUM_FIELDS)
    assert table[0, fields.ROW] < 0


def check_decoded_pages(rng: np.random.Generator, spec: TileSpec, capacity: int) -> None:
    cu, kv_lens, num_seqs = draw(rng, spec)
    num_rows = int(num_seqs[0])
    pages = rng.integers(0, 300, (12, 200)).astype(np.int32)
    pages[1::2, : rng.integers(200)] = pages[0, : rng.integers(1, 2)]
    out = np.full(spec.tiles_len, -7, np.int32)
    build_tiles(spec, cu, kv_lens, num_seqs, out, pages)
    check(spec, out, cu, kv_lens, num_seqs, pages)
    decoded = out[spec.decoded_offset :][: out[NUM_DECODED]]
    assert len(set(decoded.tolist())) == len(decoded) <= capacity, "a page is decoded twice"
    wanted = [-(-int(kv_lens[row]) // 32) for row in range(num_rows) if cu[row + 1] - cu[row] > 96]
    if sum(wanted) <= capacity and (spec.window is None or spec.window >= 96):
        table = out[spec.tiles_offset(1) :][: out[1] * NUM_FIELDS].reshape(-1, NUM_FIELDS)
        assert not any(cu[row + 1] - cu[row] > 96 for row in table[:, fields.ROW].tolist())


def byte_spec(num_tokens: int, max_num_seqs: int, scratch_pages: int, heads: int = 10) -> TileSpec:
    return tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=4 * heads, num_kv_heads=heads,
        head_dim=128, page_size=32, dtype="bfloat16", backend="pallas_mosaic_gpu", kv_dtype="int8",
        scratch_pages=scratch_pages,
    )  # fmt: skip


def test_only_steps_with_long_prompts_have_a_scratch_pool() -> None:
    assert [byte_spec(tokens, 8, 50).scratch_pages for tokens in (16, 256, 272, 2048)] == [0, 0, 50, 50]
    assert byte_spec(512, 8, 0).scratch_pages == 0 and len(byte_spec(512, 8, 0).blocks.classes) == 2
    spec = byte_spec(512, 8, 50)
    with pytest.raises(AttentionArgumentError, match="page_indices = None: must be given"):
        build_tiles(spec, np.array([0, 300]), np.array([300]), 1)
    batch = [jax.numpy.asarray(one, np.int32) for one in ([0, *[300] * 8], [300] * 8, [1])]
    with pytest.raises(AttentionArgumentError, match="scratch_pages = 50: must be 0 for a list"):
        build_tiles_traced(spec, *batch)
    with pytest.raises(AttentionArgumentError, match="scratch_pages = -1"):
        byte_spec(512, 8, -1)
    blocks = byte_spec(512, 8, 0).blocks
    sizes: dict[str, Any] = {
        "num_tokens": 512, "max_num_seqs": 8, "num_q_heads": 40, "num_kv_heads": 10, "head_dim": 128,
        "page_size": 32, "dtype": "bfloat16", "backend": "pallas_mosaic_gpu", "kv_dtype": "int8",
    }  # fmt: skip
    with pytest.raises(AttentionArgumentError, match="scratch_pages = 50: must be 0 unless"):
        tile_spec(**sizes, blocks=blocks, scratch_pages=50)


def prompt_spec(num_tokens: int, max_num_seqs: int, *, fills_rounds: bool, heads: int = 10) -> TileSpec:
    """Return the spec of the Mosaic kernel for prompts, with or without the rule."""
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=4 * heads, num_kv_heads=heads,
        head_dim=128, page_size=32, dtype="bfloat16", backend="pallas_mosaic_gpu",
    )  # fmt: skip
    assert spec.blocks.classes[-1].fills_rounds
    last = replace(spec.blocks.classes[-1], fills_rounds=fills_rounds)
    return replace(spec, blocks=BlockSizes((*spec.blocks.classes[:-1], last)))


def list_of(spec: TileSpec, rows: list[tuple[int, int]]) -> np.ndarray:
    """Return the checked tiles of the last class for rows of (query length, context)."""
    missing = spec.max_num_seqs - len(rows)
    cu = np.cumsum([0, *(q for q, _ in rows), *[0] * missing]).astype(np.int32)
    kv_lens = np.array([kv for _, kv in rows] + [0] * missing, np.int32)
    num_seqs = np.array([len(rows)], np.int32)
    tiles = build_tiles(spec, cu, kv_lens, num_seqs)
    check(spec, tiles, cu, kv_lens, num_seqs)
    index = len(spec.blocks.classes) - 1
    return tiles[spec.tiles_offset(index) :][: tiles[index] * NUM_FIELDS].reshape(-1, NUM_FIELDS)


def busiest_keys(tiles: np.ndarray, heads: int) -> int:
    """Return the work of the busiest program as the Mosaic kernel deals items out, in keys.

    An item takes as long as 256 keys besides its own, and a part of a tile as long as 512.
    """
    widths = tiles[:, fields.KV_END] - tiles[:, fields.KV_BEGIN]
    items = np.repeat(widths + np.where(tiles[:, fields.SLOT] >= 0, 512, 256), heads)
    loads = np.zeros(NUM_PROGRAMS, np.int64)
    for number, item in enumerate(items):
        turn, place = divmod(number, NUM_PROGRAMS)
        loads[place if turn % 2 == 0 else NUM_PROGRAMS - 1 - place] += item
    return int(loads.max())


@pytest.mark.parametrize(
    ("rows", "num_whole", "num_parts"),
    [
        ([(512, 8512)], 13, 12),
        ([(512, 20512)], 13, 12),
        ([(1024, 21024)], 26, 12),
        ([(256, 9000), (256, 9000)], 13, 12),
        ([(512, 8512), (64, 64), (96, 200)], 13 + 5, 12),
        ([(2048, 22048)], 64, 0),
    ],
)
def test_wide_tiles_of_whole_rounds_stay_whole(
    rows: list[tuple[int, int]], num_whole: int, num_parts: int
) -> None:
    """Of 10 heads 13 tiles fill a round of 132 programs; the parts of what is left fill another."""
    num_tokens = sum(q for q, _ in rows)
    tiles = list_of(prompt_spec(num_tokens, 4, fills_rounds=True), rows)
    is_part = tiles[:, fields.SLOT] >= 0
    assert ((~is_part).sum(), is_part.sum()) == (num_whole, num_parts)
    before = list_of(prompt_spec(num_tokens, 4, fills_rounds=False), rows)
    if num_parts:
        assert busiest_keys(tiles, 10) < 0.92 * busiest_keys(before, 10)
    else:
        np.testing.assert_array_equal(tiles, before)


@pytest.mark.parametrize("lens", [[2048], [512], [1000], [2048] * 4, [8192], [3000, 700, 2048, 65]])
@pytest.mark.parametrize("heads", [10, 40])
def test_prompts_without_history_are_divided_as_without_the_rule(lens: list[int], heads: int) -> None:
    rows = [(length, length) for length in lens]
    found = [
        list_of(prompt_spec(sum(lens), 4, fills_rounds=fills, heads=heads), rows) for fills in (True, False)
    ]
    np.testing.assert_array_equal(*found)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_filling_rounds_takes_no_longer(seed: int) -> None:
    """Mixed rows as well: the rule is taken only where the busiest program has less to do."""
    rng = np.random.default_rng(seed)
    num_tokens, heads = int(rng.integers(257, 3000)), int(rng.choice([4, 5, 8, 10, 40]))
    rows = []
    left = num_tokens
    for _ in range(int(rng.integers(1, 6))):
        q_len = int(rng.integers(0, left + 1))
        rows.append((q_len, q_len + int(rng.integers(0, rng.choice([2, 1000, 30_000])))))
        left -= q_len
    with_rule, without = (
        busiest_keys(list_of(prompt_spec(num_tokens, 6, fills_rounds=fills, heads=heads), rows), heads)
        for fills in (True, False)
    )
    block_kv = 128  # lists are compared in whole blocks
    assert with_rule <= without + 6 * block_kv, rows


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_classes_that_no_row_needs(num_tokens: int) -> None:
    blocks = BlockSizes(tuple(TileClass(rows, 64, 4, 3, 128, 40) for rows in (16, 32, 64)))
    spec = spec_for(num_tokens, 4, blocks, (2, 2))
    batch = draw(np.random.default_rng(0), spec)
    check(spec, np.array(jax.jit(lambda *batch: build_tiles_traced(spec, *batch))(*batch)), *batch)


def test_the_header_holds_the_count_of_every_class() -> None:
    classes = tuple(TileClass(16 << i, 64, 4, 3, 128, 8) for i in range(8))
    spec = spec_for(300, 9, BlockSizes(classes[:7]))
    batch = draw(np.random.default_rng(0), spec)
    check(spec, build_tiles(spec, *batch), *batch)
    with pytest.raises(AttentionArgumentError, match="at most 7 classes"):
        spec_for(300, 9, BlockSizes(classes))


def test_xla_needs_no_tiles() -> None:
    spec = tile_spec(
        num_tokens=8,
        max_num_seqs=8,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=80,
        page_size=16,
        dtype="float32",
        backend="xla",
    )
    assert spec.tiles_len == 0
    assert build_tiles(spec, np.zeros(9, np.int32), np.zeros(8, np.int32), 0).shape == (0,)
    assert len({spec, spec}) == 1


def test_errors_name_what_exceeds_the_spec() -> None:
    spec = spec_for(16, 4, ONE)
    cu, kv_lens = np.array([0, 17, 17, 17, 17], np.int32), np.full(4, 50, np.int32)
    with pytest.raises(AttentionArgumentError, match=r"cu_q_lens = 17: the spec holds 16"):
        build_tiles(spec, cu, kv_lens, np.array([1], np.int32))
    with pytest.raises(AttentionArgumentError, match=r"num_seqs = 5: the spec holds 4"):
        build_tiles(spec, cu, kv_lens, np.array([5], np.int32))
    with pytest.raises(AttentionArgumentError, match=r"out\.shape"):
        build_tiles(spec, cu, kv_lens, np.array([0], np.int32), out=np.zeros(3, np.int32))
