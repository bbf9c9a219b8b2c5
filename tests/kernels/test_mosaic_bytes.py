"""The Mosaic kernel for pages in 8 bits in interpret mode against the dense reference, races and barriers too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    build_tiles,
    byte_class,
    mosaic_launch,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import assert_equals_reference, make_batch, stored

SCALE = 0.13
LARGE = TileClass(64, 32, 4, 2, 64, 8)
# One key and none, ends inside and at the end of pages and of blocks, two tokens, a prompt, and split ranges.
ROWS = [(1, 70), (1, 300), (2, 320), (1, 1), (0, 12), (1, 128), (1, 129), (9, 40), (1, 640)]


@pytest.fixture(autouse=True)
def checked_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs instead of one for each multiprocessor, and the interpreter's race detector on."""
    checked = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda: checked)
    monkeypatch.setattr(mosaic_launch, "NUM_PROGRAMS", 2)


@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype", "classes"),
    [
        (Heads(4, 1, 128), 32, "int8", (byte_class(8, 128, 2, 2, 128, 8), LARGE)),
        pytest.param(
            Heads(10, 2, 128), 64, "float8_e4m3fn", (byte_class(8, 64, 1, 3, 128, 16), LARGE),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Heads(16, 1, 128), 32, "int8", (byte_class(16, 64, 3, 2, 64, 8),), marks=pytest.mark.long
        ),
    ],
    ids=["with_triton", "group5", "group16"],
)  # fmt: skip
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
