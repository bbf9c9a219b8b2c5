"""The Mosaic kernel in interpret mode against the dense reference, with checks of races and barriers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.devices import mosaic_device_limit
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    build_tiles,
    mosaic_class,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.block_sizes import MERGE_ROWS
from pallas_kernels.ragged_paged_attention.metadata import build_tiles_traced
from pallas_kernels.ragged_paged_attention.shapes import Heads
from pallas_kernels.ragged_paged_attention.tile_lists import MERGE_FIRST_ROW
from tests.kernels.batches import Room, assert_equals_reference, make_batch
from tests.seeds import EVERYTHING

SCALE = 0.13
SMALL = TileClass(16, 32, 4, 2, 64, 8)
# Whole tiles and partial ones, one key and none, ends inside and at the end of pages; some are split.
ROWS = [(70, 70), (33, 200), (5, 320), (1, 1), (0, 12), (64, 128)]
FEW_ROWS = [(37, 70), (5, 320), (1, 1), (0, 12), (2, 128)]
# Batches with the most padding: no rows, a row without tokens, one token. Each takes as long as a full batch.
PADDED: list[list[tuple[int, int]]] = [[], [(0, 0)], [(1, 1)]]
ONE_TOKEN = PADDED if EVERYTHING else PADDED[-1:]
SPARE_HEADS = "bfloat16", (mosaic_class(64, 64, 3, 64, 8), mosaic_class(128, 64, 2, 128, 8))
SERVED: dict[str, Any] = {
    "num_tokens": 256, "max_num_seqs": 8, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128,
    "page_size": 32, "dtype": "bfloat16", "backend": "pallas_mosaic_gpu",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("checked_interpreter")


@pytest.mark.parametrize(
    ("rows", "heads", "page_size", "dtype", "classes", "padded"),
    [
        pytest.param(
            ROWS,
            Heads(4, 1, 128),
            32,
            "bfloat16",
            (SMALL, mosaic_class(128, 128, 2, 128, 8)),
            ONE_TOKEN,
            marks=pytest.mark.long,
        ),
        pytest.param(
            ROWS,
            Heads(2, 2, 64),
            16,
            "float16",
            (mosaic_class(64, 64, 3, 64, 8), mosaic_class(128, 64, 2, 128, 8)),
            ONE_TOKEN,
            marks=pytest.mark.long,
        ),
        pytest.param(ROWS, Heads(14, 2, 64), 32, *SPARE_HEADS, ONE_TOKEN, marks=pytest.mark.long),
        pytest.param(FEW_ROWS, Heads(6, 2, 64), 32, *SPARE_HEADS, ONE_TOKEN, marks=pytest.mark.long),
        # With 128 and 22 tokens the second range leaves a warpgroup without tokens, over up to four blocks.
        # 64 tokens fill the first warpgroup exactly; with 70 the second has six.
        pytest.param(
            [(22, 200), (150, 270), (64, 64), (70, 70)],
            Heads(1, 1, 64),
            16,
            "bfloat16",
            (mosaic_class(128, 64, 2, 256, 8),),
            PADDED,
            marks=pytest.mark.long,
        ),
    ],
    ids=["with_triton", "two_classes", "spare_heads", "spare_head", "warpgroup_stands_by"],
)
def test_equals_reference(
    rows: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    dtype: str,
    classes: tuple[TileClass, ...],
    padded: list[list[tuple[int, int]]],
) -> None:
    batch = make_batch(np.random.default_rng(page_size), rows, heads, page_size=page_size, dtype=dtype)
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=page_size, dtype=dtype,
        backend="pallas_mosaic_gpu", blocks=BlockSizes(classes),
    )  # fmt: skip
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    assert tiles[len(classes)]  # something is merged

    def attend(tiles: Any, *batch: Any) -> Any:
        return ragged_paged_attention(*batch, sm_scale=SCALE, metadata=(spec, tiles), interpret=True)

    # Interpreted kernels are large programs that run once: compile them fast rather than well.
    jitted = jax.jit(attend, compiler_options={"xla_backend_optimization_level": 0})
    assert_equals_reference(jitted(jnp.asarray(tiles), *batch), batch, SCALE)
    for few_rows in padded:
        room = Room(len(batch.q), len(batch.kv_lens), batch.page_indices.shape[1], len(batch.kv_pages))
        rng = np.random.default_rng(0)
        few = make_batch(rng, few_rows, heads, page_size=page_size, dtype=dtype, room=room)
        tiles = build_tiles(spec, few.cu_q_lens, few.kv_lens, few.num_seqs)
        assert_equals_reference(jitted(jnp.asarray(tiles), *few), few, SCALE)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"head_dim": 256}, "head_dim"),
        ({"num_q_heads": 10}, "num_q_heads / num_kv_heads"),
        ({"num_q_heads": 64}, "num_q_heads / num_kv_heads"),
        ({"blocks": BlockSizes((mosaic_class(128, 32, 2, 128, 8),))}, "blocks"),
        ({"blocks": BlockSizes((mosaic_class(64, 64, 2, 64, 8), TileClass(128, 64, 8, 3, 64, 8)))}, "blocks"),
        ({"blocks": BlockSizes((mosaic_class(64, 64, 2, 64, 8),)), "backend": "pallas_triton"}, "blocks"),
    ],
    ids=["dtype", "head_dim", "group5", "group32", "keys", "order", "backend"],
)
def test_unsupported_arguments_are_named(changed: dict[str, Any], field: str) -> None:
    tile_spec(**SERVED)
    with pytest.raises(AttentionArgumentError) as error:
        tile_spec(**SERVED | changed)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("num_tokens", "heads", "classes"),
    [
        (16, 40, [False]),  # hardly any tokens
        (131, 2, [False, False]),  # too few tiles
        (132, 2, [True]),
        (256, 2, [True]),
        (257, 2, [True, True]),
    ],
)
def test_choice_of_mosaic_classes(num_tokens: int, heads: int, classes: list[bool]) -> None:
    sizes = {"num_tokens": num_tokens, "num_q_heads": heads, "num_kv_heads": heads}
    blocks = tile_spec(**SERVED | sizes).blocks
    assert [c.mosaic for c in blocks.classes] == classes


class Device:
    platform, device_kind = "gpu", "NVIDIA H200"

    def __init__(self, capability: str) -> None:
        self.compute_capability = capability


def test_device_limit() -> None:
    assert mosaic_device_limit(Device("9.0")) is None
    assert "8.0" in str(mosaic_device_limit(Device("8.0")))
    assert "10.0" in str(mosaic_device_limit(Device("10.0")))
    assert "cpu" in str(mosaic_device_limit(jax.devices("cpu")[0]))


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "expected", "kv_dtype"),
    [
        ("9.0", "bfloat16", 128, "pallas_mosaic_gpu", "int8"),
        ("9.0", "bfloat16", 128, "pallas_mosaic_gpu", "float8_e4m3fn"),
        ("9.0", "float16", 128, "pallas_triton", "int8"),
        ("9.0", "bfloat16", 64, "pallas_triton", "int8"),
        ("8.0", "bfloat16", 128, "pallas_triton", "int8"),
        ("9.0", "bfloat16", 128, "pallas_mosaic_gpu", None),
        ("9.0", "float32", 128, "pallas_triton", None),
        ("9.0", "bfloat16", 256, "pallas_triton", None),
        ("9.0", "bfloat16", 80, "xla", None),
        ("8.0", "bfloat16", 128, "pallas_triton", None),
        ("10.0", "bfloat16", 128, "pallas_triton", None),
        ("7.5", "bfloat16", 128, "xla", None),
    ],
)
def test_choice_of_auto(
    capability: str,
    dtype: str,
    head_dim: int,
    expected: str,
    kv_dtype: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Auto selects the Hopper kernel where it is supported; see `AUTO_BACKENDS`."""
    monkeypatch.setattr(jax, "devices", lambda: [Device(capability)])
    spec = tile_spec(
        num_tokens=256, max_num_seqs=8, num_q_heads=4, num_kv_heads=2, head_dim=head_dim, page_size=32,
        dtype=dtype, kv_dtype=kv_dtype,
    )  # fmt: skip
    assert spec.backend == expected


def test_merges_cover_the_rows_with_tokens() -> None:
    """Rows are in head-major order, spread over a partial tile, but merges count them token by token."""
    spec = tile_spec(
        num_tokens=64, max_num_seqs=4, num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=32,
        dtype="bfloat16", backend="pallas_mosaic_gpu",
        blocks=BlockSizes((SMALL, mosaic_class(128, 64, 2, 64, 8))),
    )  # fmt: skip
    batch = np.array([0, 9, 9, 9, 9], np.int32), np.array([500, 0, 0, 0], np.int32), np.array([1], np.int32)
    tiles = build_tiles(spec, *batch)
    first = spec.tiles_offset(2)
    merges = tiles[first : first + 8 * tiles[2]].reshape(-1, 8)
    np.testing.assert_array_equal(merges[:, MERGE_FIRST_ROW], np.arange(0, 9 * 4, MERGE_ROWS))
    traced = np.asarray(jax.jit(lambda *batch: build_tiles_traced(spec, *batch))(*batch))
    np.testing.assert_array_equal(traced[:3], tiles[:3])
    np.testing.assert_array_equal(traced[first : first + merges.size], merges.ravel())
