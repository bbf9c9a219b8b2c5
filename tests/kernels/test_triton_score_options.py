"""Windows, softcap and sinks in the Triton kernel, interpreted, against the dense reference."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    build_tiles,
    pallas_triton,
    ragged_paged_attention,
    tile_lists,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import (
    Batch,
    Room,
    assert_equals_reference,
    hide_keys,
    hide_pages,
    make_batch,
    random_rows,
    stored,
)
from tests.kernels.planting import plant

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

SCALE = 0.17
# Few programs and short splits, so that small batches are also split and merged.
BLOCKS = BlockSizes((TileClass(16, 32, 4, 2, 64, 8), TileClass(64, 16, 4, 2, 64, 8)))
ONE_LOOP = BlockSizes((TileClass(16, 16, 4, 2, 32, 16, whole_loop=False),))
ROWS = [(1, 70), (5, 33), (40, 40), (1, 1), (0, 12), (60, 250), (17, 200), (8, 8)]
ROOM = Room(num_tokens=140, max_num_seqs=9, pages_per_seq=17, num_pages=60)
WINDOWS = (1, 31, 32, 33, 40, 130)
HEADS = Heads(4, 2, 32)
SINKS = np.array([-20, 0, 3, 20], np.float32)
ALL_OPTIONS: dict[str, Any] = {"window": 100, "softcap": 0.6, "sinks": SINKS}


def attend(
    batch: Batch,
    blocks: BlockSizes = BLOCKS,
    kv_dtype: str | None = None,
    page_size: int = 16,
    sinks: np.ndarray | None = None,
    **options: Any,
) -> Any:
    """Return interpreted attention with tiles built on the host."""
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pages.shape[2] // 2, head_dim=batch.q.shape[2], dtype=batch.q.dtype,
        page_size=page_size, backend="pallas_triton", blocks=blocks, kv_dtype=kv_dtype,
        window=options.get("window"),
    )  # fmt: skip
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    others = () if sinks is None else (jnp.asarray(sinks),)
    return compiled(spec, tuple(options.items()), len(others))(batch, jnp.asarray(tiles), *others)


@functools.cache
def compiled(spec: Any, options: tuple[tuple[str, Any], ...], has_sinks: int) -> Any:
    def run(batch: Batch, tiles: Any, *sinks: Any) -> Any:
        return ragged_paged_attention(
            *batch, sm_scale=SCALE, metadata=(spec, tiles), kv_dtype=spec.kv_dtype, interpret=True,
            **dict(options), sinks=sinks[0] if sinks else None,
        )  # fmt: skip

    # Interpreted kernels are large programs that run once: compile them fast rather than well.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def num_merges(batch: Batch, window: int | None) -> int:
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=4, num_kv_heads=2,
        head_dim=32, dtype=batch.q.dtype, page_size=16, backend="pallas_triton", blocks=BLOCKS, window=window,
    )  # fmt: skip
    return int(build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)[len(BLOCKS.classes)])


@pytest.mark.parametrize(
    "window", [pytest.param(window, marks=() if window == 33 else pytest.mark.long) for window in WINDOWS]
)
def test_windows(window: int) -> None:
    """Keys and values before all windows of a row hold NaN, then whole pages of another index as well."""
    batch = make_batch(np.random.default_rng(window), ROWS, HEADS, room=ROOM)
    out = attend(batch, window=window)
    assert_equals_reference(out, batch, SCALE, window=window)
    np.testing.assert_array_equal(attend(hide_keys(batch, window), window=window), out)
    free = int(np.flatnonzero(np.isnan(np.asarray(batch.kv_pages)).all(axis=(1, 2, 3)))[0])
    np.testing.assert_array_equal(attend(hide_pages(batch, window, dummy=free), window=window), out)


def test_all_options_with_splits() -> None:
    batch = make_batch(np.random.default_rng(0), ROWS, HEADS, room=ROOM)
    assert num_merges(batch, ALL_OPTIONS["window"])
    out = attend(hide_keys(batch, ALL_OPTIONS["window"]), **ALL_OPTIONS)
    assert_equals_reference(out, batch, SCALE, **ALL_OPTIONS)


def test_a_window_of_all_keys_changes_no_bit() -> None:
    batch = make_batch(np.random.default_rng(4), ROWS, HEADS, room=ROOM)
    np.testing.assert_array_equal(np.asarray(attend(batch, window=250)), np.asarray(attend(batch)))


@pytest.mark.parametrize(
    ("options", "blocks", "kv_dtype", "dtype"),
    [
        ({"softcap": 0.6}, BLOCKS, None, "float32"),
        ({"sinks": SINKS}, BLOCKS, None, "bfloat16"),
        ({"window": 40}, ONE_LOOP, None, "float32"),
        ({"window": 40, "softcap": 0.6}, BLOCKS, "int8", "float32"),
        ({"window": 40}, BLOCKS, "float8_e4m3fn", "float16"),
    ],
    ids=["softcap", "sinks", "one_loop", "int8", "e4m3"],
)
@pytest.mark.long
def test_each_option(options: dict[str, Any], blocks: BlockSizes, kv_dtype: str | None, dtype: str) -> None:
    batch = make_batch(np.random.default_rng(1), ROWS, HEADS, room=ROOM, dtype=dtype)
    batch = stored(batch, kv_dtype)
    given_ = hide_pages(batch, options["window"]) if "window" in options else batch
    out = attend(given_, blocks, kv_dtype, **options)
    assert_equals_reference(out, batch, SCALE, page_size=16, kv_dtype=kv_dtype, **options)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_batches_with_a_window(seed: int) -> None:
    """One program, whose window is shorter than some ranges of queries and longer than others."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, random_rows(rng, ROOM, 16, 90), HEADS, room=ROOM)
    assert_equals_reference(attend(hide_keys(batch, 33), window=33), batch, SCALE, window=33)


SEES, TAIL = (
    "keys[None, :] > (position - window + q_tokens)[:, None]",
    "masked=True), carry)\n            carry",
)
BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a key too many": (pallas_triton, "_attention_kernel", SEES, SEES.replace(">", ">=")),
    "a key too few": (pallas_triton, "_attention_kernel", SEES, SEES.replace("window +", "window + 1 +")),
    "the last token's window": (
        tile_lists, "_class_lists", "position - (spec.window - 1)", "position + num_tokens - spec.window"
    ),
    "no masks where windows begin": (
        pallas_triton, "_attention_kernel", "(0, num_window_blocks, functools.partial(step, masked=True)",
        "(0, num_window_blocks, functools.partial(step, masked=False)",
    ),
    "a loop is left out": (
        pallas_triton, "_attention_kernel", "(0, num_window_blocks, functools.partial(step, masked=True)",
        "(0, 0, functools.partial(step, masked=True)",
    ),
    "softcap after the mask": (
        pallas_triton, "_attention_kernel", "scores = jnp.where(visible, scores, _MASKED)",
        "scores = unscaled_softcap * jnp.tanh(jnp.where(visible, scores, _MASKED) / unscaled_softcap)",
    ),
    "a sink in every part": (
        pallas_triton, "_attention_kernel", "jnp.where(slot < 0, exp2(sinks * _LOG2_E - m * scale), 0)",
        "exp2(sinks * _LOG2_E - m * scale)",
    ),
    "no sink in a merge": (
        pallas_triton, "_merge_kernel", "total + exp2(sinks * _LOG2_E - largest)", "total"
    ),
    "the sink of another head": (pallas_triton, "_merge_kernel", "[head * group + heads]", "[head * group]"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "sink in" in name else pytest.mark.long) for name in BUGS]
)
def test_planted_bugs_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(np.random.default_rng(0), ROWS, HEADS, room=ROOM)
    plant(monkeypatch, *BUGS[name])
    monkeypatch.setitem(globals(), "compiled", compiled.__wrapped__)  # not what other tests have compiled
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equals_reference(attend(batch, **ALL_OPTIONS), batch, SCALE, **ALL_OPTIONS)
