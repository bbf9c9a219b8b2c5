"""The benchmark of products of few rows: what it tries of each layout, and how it says which is best."""

from __future__ import annotations

import json

import pytest

from model_defs import PRESETS
from pallas_kernels.decode_matmul import MatmulTile
from tests.launching import load

benchmark = load("benchmark_decode_matmul")
matmul_tiles = load("kernels.matmul_tiles")
MODELS = [("llama2-13b-gqa10", 1), ("llama2-70b", 2)]


def all_variants(model, num_devices, *, transposed):
    return [
        (what, num_rows, benchmark.variants(what, num_rows, transposed=transposed))
        for what in benchmark.projections(PRESETS[model], num_devices)
        for num_rows in (128, 32)
    ]


@pytest.mark.parametrize(("model", "num_devices"), MODELS)
def test_what_is_tried(model, num_devices):
    """Each once, all with room for its stages, and no more than a machine is held for."""
    found = all_variants(model, num_devices, transposed=True)
    for what, num_rows, variants in found:
        assert len({variant.label for variant in variants}) == len(variants)
        for variant in (variant for variant in variants if variant.tile is not None):
            assert variant.tile.divides(what.depth, what.width)
            assert variant.tile.fits(num_rows, gated=what.gated, transposed=variant.transposed)
        tiles = [variant.tile for variant in variants if variant.transposed and variant.tile is not None]
        assert {64, 128} <= {tile.block_k for tile in tiles} and {1, 4} <= {tile.cluster for tile in tiles}
        assert all(tile.shared_bytes(num_rows, gated=what.gated) > 100_000 for tile in tiles)
    assert sum(len(variants) for *_, variants in found) < 200


@pytest.mark.parametrize(("model", "num_devices"), MODELS)
def test_without_the_flag_it_tries_what_it_did(model, num_devices):
    for _, _, variants in all_variants(model, num_devices, transposed=False):
        labels = [variant.label for variant in variants]
        assert labels[0] == "xla" and labels[1].endswith(" (default)")
        assert not any(variant.transposed for variant in variants)
        assert all(variant.says["block_k"] in (None, 64) for variant in variants)


def test_a_label_says_what_is_special():
    variant = benchmark.Variant(transposed=True, tile=MatmulTile(40, 5, 2, 128))
    assert variant.says == {"program": "40x5c2k128 transposed", "layout": "[columns, depth]", "block_k": 128}
    assert benchmark.Variant(tile=MatmulTile(64, 8), is_default=True).label == "64x8 (default)"
    assert benchmark.Variant().says == {"program": "xla", "layout": "[depth, columns]", "block_k": None}


def test_columns_for_one_round_of_programs():
    assert [matmul_tiles.even_columns(width) for width in (5120, 7680, 8192, 13824, 14336)] == [
        *(40, 64, 64, 128, 112)
    ]
    assert matmul_tiles.even_columns(5128) is None


def test_the_fastest_of_each_layout():
    one = {"projection": "out", "rows": 32, "layout": "[depth, columns]", "is_right": True}
    measurements = [
        one | {"program": "xla", "us": 20.0, "tb_per_s": 2.6},
        one | {"program": "64x8", "us": 16.0, "tb_per_s": 3.3},
        one | {"program": "64x9", "is_right": False, "error": "ValueError: none"},
        one | {"program": "64x10", "us": 1.0, "tb_per_s": 52.0, "is_right": False},
        one | {"program": "40x5 transposed", "layout": "[columns, depth]", "us": 14.0, "tb_per_s": 3.7},
    ]
    assert benchmark.fastest(measurements) == [
        "fastest: out, 32 rows, [depth, columns]: 64x8, 16.0 us, 3.30 TB/s",
        "fastest: out, 32 rows, [columns, depth]: 40x5 transposed, 14.0 us, 3.70 TB/s",
    ]


def test_without_a_gpu_xla_is_still_checked(launch, capsys, monkeypatch):
    """Of both layouts; the kernels' errors are named, and the exit status is of them."""
    monkeypatch.setattr(benchmark, "_MIN_BYTES", 0)
    assert (
        launch("benchmark_decode_matmul", shared_llm=False, model="llama-tiny", transposed=True, rows="8")
        == 1
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = document["results"]["measurements"]
    assert {one["program"] for one in found if one["is_right"]} == {"xla", "xla transposed"}
    assert all(one["layout"] in ("[depth, columns]", "[columns, depth]") for one in found)
    assert all("interpret" in one["error"] for one in found if not one["is_right"])
