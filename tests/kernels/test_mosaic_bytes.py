"""The Mosaic kernel for pages in 8 bits, interpreted, against the dense reference, and its limits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    build_tiles,
    byte_class,
    mosaic_class,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.metadata import build_tiles_traced
from pallas_kernels.ragged_paged_attention.shapes import Heads
from pallas_kernels.ragged_paged_attention.tile_lists import MERGE_CLASS_ROWS, MERGE_FIRST_ROW, MERGE_TOKEN
from tests.kernels.batches import assert_equals_reference, make_batch, stored
from tests.kernels.cross_lower import lower_byte_attention
from tests.seeds import EVERYTHING

SCALE = 0.13
LARGE = TileClass(64, 32, 4, 2, 64, 8)
# One key and none, ends inside and at the end of pages and of blocks, two tokens, a prompt, and split ranges.
ROWS = [(1, 70), (1, 300), (2, 320), (1, 1), (0, 12), (1, 128), (1, 129), (9, 40), (1, 640)]
GROUP_16 = pytest.param(Heads(16, 1, 128), 32, "int8", (byte_class(16, 64, 3, 2, 64, 8),), id="group16")

pytestmark = pytest.mark.usefixtures("checked_interpreter")


@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype", "classes"),
    [
        pytest.param(
            Heads(4, 1, 128), 32, "int8", (byte_class(8, 128, 2, 2, 128, 8), LARGE), id="with_triton"
        ),
        pytest.param(
            Heads(10, 2, 128), 64, "float8_e4m3fn", (byte_class(8, 64, 1, 3, 128, 16), LARGE),
            id="group5",
        ),
        *([GROUP_16] if EVERYTHING else []),
    ],
)  # fmt: skip
@pytest.mark.long  # in seconds `test_byte_lanes` has what a lane computes, the test below that it lowers
def test_equals_reference(
    heads: Heads, page_size: int, kv_dtype: str, classes: tuple[TileClass, ...]
) -> None:
    rng = np.random.default_rng(page_size)
    batch = make_batch(rng, ROWS, heads, page_size=page_size, dtype="bfloat16")
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
    assert not get_races().races_found


SERVED: dict[str, Any] = {
    "num_tokens": 512, "max_num_seqs": 256, "num_q_heads": 40, "num_kv_heads": 10, "head_dim": 128,
    "page_size": 32, "dtype": "bfloat16", "backend": "pallas_mosaic_gpu", "kv_dtype": "int8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, [8, 128]),
        ({"num_tokens": 128}, [8, 64]),
        ({"num_q_heads": 160, "num_tokens": 256}, [16, 64]),
        ({"num_tokens": 16}, [8]),  # hardly any tokens: no launch for prompts
        ({"num_tokens": 26}, [8, 64]),  # few tiles, which are split
        ({"num_tokens": 512, "max_num_seqs": 64}, [8, 128]),  # rows of a few tokens each
        ({"page_size": 16}, []),  # its scales are half a row
    ],
)
def test_choice_of_mosaic_classes(changed: dict[str, Any], rows: list[int]) -> None:
    """Expected values are the rows of the decode and prompt classes; without any, all are Triton's."""
    classes = tile_spec(**SERVED | changed).blocks.classes
    assert [c.rows for c in classes if c.in_bytes] == rows
    assert all(c.in_bytes for c in classes) == bool(rows)
    assert [c.mosaic for c in classes] == [bool(rows and i) for i in range(len(classes))]


@pytest.mark.parametrize(
    ("classes", "changed"),
    [
        ((byte_class(8, 128, 2, 3, 256, 264),), {"kv_dtype": None}),
        ((byte_class(8, 128, 2, 3, 256, 264),), {"backend": "pallas_triton"}),
        ((byte_class(8, 128, 2, 3, 256, 264),), {"page_size": 16}),
        ((byte_class(8, 128, 2, 3, 256, 264),), {"num_q_heads": 160}),
        ((byte_class(32, 128, 2, 3, 256, 264),), {}),
        ((byte_class(8, 32, 2, 3, 256, 264),), {}),
        ((byte_class(8, 64, 4, 3, 256, 264),), {}),
        ((mosaic_class(64, 128, 3, 256, 264),), {}),
        ((TileClass(8, 32, 2, 4, 256, 2048),), {}),
    ],
    ids=["no_bytes", "backend", "page", "group", "rows", "keys", "pairs", "mosaic", "triton"],
)
def test_unsupported_arguments_are_refused(classes: tuple[TileClass, ...], changed: dict[str, Any]) -> None:
    with pytest.raises(AttentionArgumentError, match="blocks"):
        tile_spec(**SERVED | changed, blocks=BlockSizes(classes))


@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype", "blocks"),
    [
        (Heads(40, 10, 128), 32, "int8", None),
        pytest.param(Heads(16, 1, 128), 64, "float8_e4m3fn", None, marks=pytest.mark.long),
        pytest.param(
            Heads(40, 40, 128), 64, "int8", (byte_class(8, 64, 3, 3, 256, 396),), marks=pytest.mark.long
        ),
        pytest.param(
            Heads(40, 8, 128),
            32,
            "float8_e4m3fn",
            (byte_class(8, 128, 1, 6, 256, 132),),
            marks=pytest.mark.long,
        ),
    ],
    ids=["default", "group16", "three_pairs", "one_pair"],
)
def test_lowers_for_an_h200(heads: Heads, page_size: int, kv_dtype: str, blocks: Any) -> None:
    num_tokens, max_num_seqs = 2048, 2048
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=page_size, dtype="bfloat16",
        backend="pallas_mosaic_gpu", kv_dtype=kv_dtype, blocks=None if blocks is None else BlockSizes(blocks),
    )  # fmt: skip

    text = lower_byte_attention(spec, heads)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == len(spec.blocks.classes)
    assert text.count("xla.gpu.triton") == 1


def test_tiles_of_eight_rows_have_a_merge_each() -> None:
    """That is half of the rows of a merge, on the host and in a jit."""
    classes = (byte_class(8, 64, 2, 6, 64, 80), TileClass(64, 32, 4, 2, 64, 8))
    spec = tile_spec(**SERVED | {"num_tokens": 64, "max_num_seqs": 8}, blocks=BlockSizes(classes))
    q_lens, kv_lens = np.array([1, 2, 1, 9, 1, 0, 1]), np.array([500, 300, 64, 90, 1000, 7, 1, 0], np.int32)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens), [15]]).astype(np.int32)
    batch = cu_q_lens, kv_lens, np.array([7], np.int32)
    tiles = build_tiles(spec, *batch)
    num_classes = len(classes)
    merges = tiles[spec.tiles_offset(num_classes) :][: 8 * tiles[num_classes]].reshape(-1, 8)
    assert len(merges) == 3 and (merges[:, MERGE_CLASS_ROWS] == 8).all()
    assert (merges[:, MERGE_FIRST_ROW] == 0).all() and set(merges[:, MERGE_TOKEN]) == {0, 1, 13}
    traced = np.asarray(jax.jit(lambda *batch: build_tiles_traced(spec, *batch))(*batch))
    np.testing.assert_array_equal(traced[:8], tiles[:8])
    for index in range(num_classes + 1):
        first, count = spec.tiles_offset(index), 8 * tiles[index]
        np.testing.assert_array_equal(traced[first : first + count], tiles[first : first + count])
