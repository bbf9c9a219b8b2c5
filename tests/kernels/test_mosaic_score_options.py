"""Windows and sinks in the Mosaic kernels, interpreted, against the dense reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    build_tiles,
    byte_class,
    byte_prompt_class,
    mosaic_class,
    mosaic_compute,
    mosaic_launch,
    pallas_mosaic_gpu,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import Batch, assert_equals_reference, hide_pages, make_batch, stored
from tests.kernels.planting import plant

pytestmark = pytest.mark.usefixtures("checked_interpreter")

SCALE = 0.13
# Whole tiles and partial ones, one key and none, windows that begin inside pages and at their start.
ROWS = [(70, 300), (33, 200), (1, 320), (1, 1), (0, 12), (5, 161)]
CLASSES = (mosaic_class(64, 64, 3, 64, 8), mosaic_class(128, 64, 2, 128, 8))


def attend(
    batch: Batch,
    classes: tuple[TileClass, ...],
    page_size: int,
    *,
    kv_dtype: str | None = None,
    scratch_pages: int = 0,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    sm_scale: float = SCALE,
) -> Any:
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pages.shape[2] // 2, head_dim=batch.q.shape[2], page_size=page_size,
        dtype=batch.q.dtype, backend="pallas_mosaic_gpu", blocks=BlockSizes(classes), kv_dtype=kv_dtype,
        scratch_pages=scratch_pages, window=window,
    )  # fmt: skip
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs, None, batch.page_indices)

    def run(tiles: Any, sinks: Any, *batch: Any) -> Any:
        return ragged_paged_attention(
            *batch, sm_scale=sm_scale, window=window, sinks=sinks, metadata=(spec, tiles), kv_dtype=kv_dtype,
            interpret=True,
        )  # fmt: skip

    # Interpreted kernels are large programs that run once: compile them fast rather than well.
    jitted = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    return jitted(jnp.asarray(tiles), None if sinks is None else jnp.asarray(sinks), *batch)


def sinks_of(heads: Heads) -> np.ndarray:
    return np.resize(np.array([-20, 0, 3, 20], np.float32), heads.num_q_heads)


def batch_of(rows: list[tuple[int, int]], heads: Heads, page_size: int = 32) -> Batch:
    rng = np.random.default_rng(page_size)
    return make_batch(rng, rows, heads, page_size=page_size, dtype="bfloat16")


def with_dummy(batch: Batch, window: int, page_size: int = 32) -> Batch:
    """Return the batch with another index, of a page of NaN, for all pages before all windows of a row."""
    free = np.flatnonzero(np.isnan(np.asarray(batch.kv_pages, np.float32)).all(axis=(1, 2, 3)))
    return hide_pages(batch, window, page_size=page_size, dummy=int(free[0]))


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(window, marks=() if window == 33 else pytest.mark.long)
        for window in (1, 31, 32, 33, 40, 130)
    ],
)
def test_windows(window: int) -> None:
    batch = batch_of(ROWS, Heads(2, 1, 64))
    out = attend(with_dummy(batch, window), CLASSES, 32, window=window)
    assert_equals_reference(out, batch, SCALE, window=window)
    assert not get_races().races_found


@pytest.mark.long
def test_a_window_of_all_keys_changes_no_bit() -> None:
    batch = batch_of(ROWS, Heads(2, 1, 64))
    whole = np.asarray(attend(batch, CLASSES, 32), np.float32)
    np.testing.assert_array_equal(np.asarray(attend(batch, CLASSES, 32, window=320), np.float32), whole)


@pytest.mark.parametrize(
    ("rows", "heads", "page_size", "classes", "window"),
    [
        # Three and six heads on a KV head: a warpgroup has several heads, the last of them padding.
        (ROWS, Heads(6, 2, 64), 32, CLASSES, 100),
        (ROWS[:3], Heads(3, 1, 64), 16, CLASSES[1:], None),
        # The second range leaves a warpgroup without tokens, over several blocks.
        ([(22, 200), (150, 270), (70, 70)], Heads(1, 1, 64), 16, (mosaic_class(128, 64, 2, 256, 8),), 120),
    ],
    ids=["spare_heads", "sinks_alone", "warpgroup_stands_by"],
)  # fmt: skip
@pytest.mark.long
def test_sinks_and_windows(
    rows: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    classes: tuple[TileClass, ...],
    window: int | None,
) -> None:
    batch, sinks = batch_of(rows, heads, page_size), sinks_of(heads)
    given = batch if window is None else with_dummy(batch, window, page_size)
    out = attend(given, classes, page_size, window=window, sinks=sinks)
    assert_equals_reference(out, batch, SCALE, window=window, sinks=sinks)
    assert not get_races().races_found


BYTE_ROWS = [(1, 70), (1, 300), (2, 320), (1, 1), (0, 12), (70, 129), (9, 140), (1, 640)]
DECODING = byte_class(8, 64, 1, 3, 128, 8)


@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype", "classes", "window", "scratch_pages"),
    [
        (Heads(4, 1, 128), 32, "int8", (DECODING, byte_prompt_class(64, 64, 2, 128, 8)), 100, 0),
        (Heads(5, 1, 128), 64, "float8_e4m3fn", (DECODING, byte_prompt_class(64, 64, 2, 128, 8)), 33, 0),
        (Heads(16, 1, 128), 32, "float8_e4m3fn", (byte_class(16, 64, 2, 2, 64, 8),), 130, 0),
        (
            Heads(8, 1, 128), 32, "int8",
            (DECODING, byte_prompt_class(64, 64, 2, 128, 8), mosaic_class(128, 64, 2, 64, 8)), 60, 4,
        ),
    ],
    ids=["int8", "e4m3", "group16", "decoded_pages"],
)  # fmt: skip
@pytest.mark.long
def test_pages_in_8_bits(
    heads: Heads,
    page_size: int,
    kv_dtype: str,
    classes: tuple[TileClass, ...],
    window: int,
    scratch_pages: int,
) -> None:
    rows = BYTE_ROWS if len(classes) > 1 else BYTE_ROWS[:5]
    whole, sinks = batch_of(rows, heads, page_size), sinks_of(heads)
    batch = stored(whole, kv_dtype)
    given = stored(with_dummy(whole, window, page_size), kv_dtype)
    out = attend(
        given, classes, page_size, kv_dtype=kv_dtype, scratch_pages=scratch_pages, window=window, sinks=sinks
    )
    assert_equals_reference(
        out, batch, SCALE, page_size=page_size, kv_dtype=kv_dtype, window=window, sinks=sinks
    )
    assert not get_races().races_found


SEES = "keys > self.item.position - window + tokens"
BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a key too many": (mosaic_compute._Rows, "mask", SEES, SEES.replace(">", ">=")),
    "a key too few": (mosaic_compute._Rows, "mask", SEES, SEES.replace("window +", "window + 1 +")),
    "no masks where windows begin": (
        mosaic_compute._Rows, "attend", "num_blocks, functools.partial(self.step, masked=True",
        "num_blocks, functools.partial(self.step, masked=False",
    ),
    "a page before the window": (
        pallas_mosaic_gpu, "page_ids", "position - (window - 1)", "position - window - 31"
    ),
    "a page with unused slots": (
        mosaic_compute._Rows, "zero_square", "> self.item.position - window", "> -window",
    ),
    "a sink in every part": (
        mosaic_launch.Inputs, "sink", "jnp.where(item.slot < 0, found, _NO_SINK)", "found"
    ),
    "the sink of another head": (mosaic_compute, "_sinks", "rows >= first", "rows < 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.long
def test_planted_bugs_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, scale = Heads(2, 1, 64), SCALE / 2
    # With the shorter window, the last row sees keys of its last page alone, which has unused slots.
    window = 5 if "page" in name else 40
    batch, sinks = batch_of([*ROWS, (1, 165)], heads), np.array([0, 3], np.float32)
    given = with_dummy(batch, window)
    plant(monkeypatch, *BUGS[name])
    monkeypatch.setattr(pallas_mosaic_gpu, "_attention_of", pallas_mosaic_gpu._attention_of.__wrapped__)
    out = attend(given, CLASSES, 32, window=window, sinks=sinks, sm_scale=scale)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equals_reference(out, batch, scale, window=window, sinks=sinks)
