"""The benchmark of products with weights in 8 bits: what it times, and its figures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from model_defs import PRESETS
from pensieve_jax import ConfigError
from pensieve_lab.kernels.projections import projections
from tests.launching import load

benchmark = load("benchmark_byte_matmul")


@pytest.mark.parametrize("num_rows", [1, 32, 128])
@pytest.mark.parametrize("model", ["llama2-13b-gqa10", "qwen3-8b"])
def test_what_is_tried(model: str, num_rows: int) -> None:
    """For each kind of weights XLA comes first; the kernel has its default tile and others, once each."""
    for what in projections(PRESETS[model], 1):
        found = benchmark.variants(what, num_rows, ["int8", "fp8"])
        programs = {name: [one.program for one in found if one.weights == name] for name in ("int8", "fp8")}
        assert [one.program for one in found[:2]] == ["xla", "kernel"]
        assert programs["int8"] == programs["fp8"] and programs["int8"][0] == "xla"
        assert len(set(found)) == len(found) and len(programs["int8"]) >= 3
        for one in found:
            assert one.tile is None or one.tile.fits(num_rows, gated=what.gated)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"rows": "12"}, "--rows is '12', but must be 1 to 8, or multiples of 8"),
        ({"weights": "int4"}, "--weights is 'int4', but must be one or more of int8, fp8"),
        ({"weights": ""}, "--weights is ''"),
        ({"model": "llama-tiny"}, "device is 'cpu', but must be one that the kernels run on"),
    ],
)
def test_refusals(launch, flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        launch("benchmark_byte_matmul", shared_llm=False, **flags)


@pytest.mark.long
def test_figures_of_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do not run here are named with their errors; XLA's products are timed."""
    monkeypatch.setattr(benchmark, "_MIN_BYTES", 0)
    monkeypatch.setattr(
        benchmark,
        "tiles",
        lambda what, num_rows: [benchmark.ByteTile(64, 2)] if what.depth % 128 == 0 else [],
    )
    what = projections(PRESETS["llama-tiny"], 1)[1]
    with ThreadPoolExecutor(1) as pool:
        found = list(benchmark.measure(what, 8, ["int8", "fp8"], pool))
    assert [one["weights"] for one in found if one["is_right"]] == ["bfloat16", "int8", "fp8"]
    assert all(one["us"] > 0 for one in found if one["is_right"])
    assert all(one["message"] for one in found if not one["is_right"])
