"""The short benchmark of 8-bit pages: every variant serves its case, and lowers for a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.ragged_paged_attention import BlockSizes, mosaic_bytes, mosaic_convert
from pallas_kernels.ragged_paged_attention.shapes import CASES, Case, Heads
from tests.launching import load

SCRIPT: Any = load("benchmark_byte_pages")


def test_every_size_serves_its_case() -> None:
    for name in (SCRIPT.MAIN, *SCRIPT.PROMPTS, *SCRIPT.OTHERS):
        for tile_class in SCRIPT._VARIANTS.get(name, ()):
            spec = SCRIPT.make_spec(CASES[name], "bfloat16", SCRIPT.MOSAIC, BlockSizes((tile_class,)), "int8")
            assert spec.blocks.classes == (tile_class,)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_what_is_timed_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, one without its products, and one without operands."""
    case = Case("small", ((1, 40),) * 3, Heads(8, 2, 128))
    monkeypatch.setitem(CASES, case.name, case)
    inputs = SCRIPT.make_inputs(case, "bfloat16", 0, "int8")
    sizes = zip(("kernel alone", "fetch alone"), SCRIPT._VARIANTS[SCRIPT.MAIN], strict=False)
    entries = [SCRIPT._kernel_alone(name, inputs, tile_class) for name, tile_class in sizes]
    tile_class = SCRIPT._VARIANTS[SCRIPT.PROMPTS[0]][0]
    other = replace(tile_class, min_split_kv=tile_class.min_split_kv + 1)  # a kernel of its own
    entries.append(SCRIPT._kernel_alone("prompts", inputs, tile_class))
    entries.append(SCRIPT._kernel_alone(SCRIPT.UNCONVERTED, inputs, other))
    assert [entry.is_checked for entry in entries] == [True, False] * 2
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    original, convert_rows = mosaic_bytes.add_block, mosaic_convert.convert_rows
    texts = []
    lower = jax.stages.Traced.lower
    monkeypatch.setattr(
        jax.stages.Traced, "lower", lambda traced, **_: lower(traced, lowering_platforms=("cuda",))
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        texts = [SCRIPT.lowered(entry).as_text() for entry in entries]
    assert mosaic_bytes.add_block is original
    assert mosaic_convert.convert_rows is convert_rows
    assert all("mosaic_gpu_v2" in text for text in texts)
    assert len(texts[1]) < len(texts[0]) and len(texts[3]) < len(texts[2])
