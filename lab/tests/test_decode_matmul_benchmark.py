"""The benchmark of matrix products with few rows: its variants, and how it reports the fastest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from model_defs import PRESETS
from pallas_kernels.decode_matmul import MatmulTile
from pensieve_jax import ConfigError
from tests.launching import load

benchmark = load("benchmark_decode_matmul")
MODELS = [("llama2-13b-gqa10", 1), ("llama2-70b", 2)]


@pytest.mark.parametrize(("model", "num_devices"), MODELS)
@pytest.mark.parametrize("num_rows", [128, 32])
def test_what_is_tried(model, num_devices, num_rows):
    """XLA, the default tile, and others are tried once each, if their stages fit."""
    for what in benchmark.projections(PRESETS[model], num_devices):
        variants = benchmark.variants(what, num_rows)
        labels = [variant.label for variant in variants]
        assert labels[0] == "xla" and labels[1].endswith(" (default)") and len(labels) > 4
        assert len({variant.tile for variant in variants}) == len(variants)
        for variant in variants[1:]:
            assert variant.tile.divides(what.depth, what.width)
            assert variant.tile.fits(num_rows, gated=what.gated)


def test_a_decoder_without_a_gate():
    found = {what.name: what for what in benchmark.projections(PRESETS["opt-66b"], 2)}
    assert not any(what.gated for what in found.values())
    assert (found["down"].depth, found["down"].width) == (18432, 9216)
    labels = [variant.label for variant in benchmark.variants(found["up"], 32)]
    assert labels[:2] == ["xla", "64x8"], "no default"


def test_a_label_says_what_is_special():
    assert benchmark.Variant(MatmulTile(64, 5, 128)).label == "64x5k128"
    assert benchmark.Variant(MatmulTile(64, 8), is_default=True).label == "64x8 (default)"
    assert benchmark.Variant().label == "xla"


def test_the_fastest():
    one = {"projection": "out", "rows": 32, "is_right": True}
    measurements = [
        one | {"program": "xla", "us": 20.0, "tb_per_s": 2.6},
        one | {"program": "64x8", "us": 16.0, "tb_per_s": 3.3},
        one | {"program": "64x9", "is_right": False, "error": "ValueError: none"},
        one | {"program": "64x10", "us": 1.0, "tb_per_s": 52.0, "is_right": False},
        one | {"rows": 8, "program": "64x8", "us": 14.0, "tb_per_s": 3.7},
    ]
    assert benchmark.fastest(measurements) == [
        "fastest: out, 32 rows: 64x8, 16.0 us, 3.30 TB/s",
        "fastest: out, 8 rows: 64x8, 14.0 us, 3.70 TB/s",
    ]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"rows": "abc"}, "--rows is 'abc', but must be integers from 1 to 128"),
        ({"rows": "0"}, "integers from 1 to 128"),
        ({"rows": "200"}, "integers from 1 to 128"),
        ({"rows": "8,12"}, "--rows is '8,12', but must be 1 to 8, or multiples of 8 up to 128"),
        ({"rows": ""}, "one or more"),
        (
            {"tensor_parallel_size": 3},
            "--tensor_parallel_size is 3, but must be .*=40 is not divisible by",
        ),
        ({"model": "llama-tiny"}, "device is 'cpu', but must be one that the kernel runs on"),
    ],
)
def test_refusals(launch, flags, says):
    with pytest.raises(ConfigError, match=says):
        launch("benchmark_decode_matmul", shared_llm=False, **flags)


@pytest.mark.long
def test_figures_of_every_program(capsys, monkeypatch):
    """If neither can be timed, the kernels' errors are named, and XLA's answer is judged."""
    monkeypatch.setattr(benchmark, "_MIN_BYTES", 0)
    what = benchmark.projections(PRESETS["llama-tiny"], 1)[0]
    with ThreadPoolExecutor(1) as pool:
        found = benchmark.measure(what, 8, pool)
    assert {one["program"] for one in found if one["is_right"]} == {"xla"}
    assert all("interpret" in one["error"] for one in found if not one["is_right"])
    assert "'program': 'xla'" in capsys.readouterr().out
