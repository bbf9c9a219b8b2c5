"""The programs about packed chunks, at small sizes."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_copies import PackedTile
from pensieve_jax import ConfigError
from tests.launching import load

measure_packing = load("measure_packing")

SMALL = {
    "num_chunks": 3, "num_decodes": 4, "context_tokens": 40, "chunk_tokens": 16, "num_repeats": 2,
    "num_launches": 2, "progress": "false",
}  # fmt: skip


def last_line(out):
    return json.loads(out.splitlines()[-1])["results"]


@pytest.mark.long
def test_batches_alone_and_beside_steps(launch, compilation_cache, capsys):
    """Each form's chunks return unchanged, or the program fails; packed ones are smaller."""
    flags = SMALL | {"dtype": "bfloat16", "compilation_cache_dir": compilation_cache, "trace": True}
    assert launch("benchmark_packing", shared_llm=False, **flags) == 0
    found = last_line(capsys.readouterr().out)
    kinds = ("gather", "gather and copy", "scatter", "copy and scatter")
    assert list(found["alone"]) == [f"{form}: {kind}" for form in ("raw", "packed") for kind in kinds]
    assert next(iter(found["beside"])) == "steps alone" and len(found["beside"]) == 5
    for one in (*found["alone"].values(), *found["beside"].values()):
        assert one["launch_s"]["num_values"] == 2 and one["dispatch_s"] > 0 and one["trace"] == {}
    assert found["slot_bytes"]["packed"] < 0.85 * found["slot_bytes"]["raw"]


@pytest.mark.long
def test_kernels_alone(launch, capsys):
    """The kernels' bits are checked in interpreted mode; without a GPU no trace exists."""
    flags = {"num_chunks": 2, "chunk_tokens": 16, "num_repeats": 1, "progress": "false", "kernels_only": True}
    assert launch("benchmark_packing", shared_llm=False, **flags) == 0
    found = last_line(capsys.readouterr().out)["variants"]
    assert [name.split(",")[0] for name in found] == ["gather", "scatter", "pack", "unpack"]
    for one in found.values():
        assert one["launch_s"]["median"] > 0 and one["kernels_s"]["median"] is None


@pytest.mark.long
def test_only_bfloat16_is_measured(launch, compilation_cache):
    with pytest.raises(ConfigError, match="--dtype is 'float32', but must be bfloat16"):
        launch("benchmark_packing", shared_llm=False, dtype="float32", **SMALL)


@pytest.mark.long
def test_escapes_of_a_model_and_of_normal_numbers(launch, capsys, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("A book of a few words that says them again. " * 40, encoding="utf-8")
    flags = {"text": text, "num_texts": 3, "context_tokens": 64, "num_tiles": 500, "outlier_scales": "64"}
    assert launch("measure_packing", shared_llm=False, progress="false", **flags) == 0
    rows = last_line(capsys.readouterr().out)["rows"]
    assert [(row["of"], row["factor"]) for row in rows] == [
        *(("normal numbers", factor) for factor in (1.0, 64.0)),
        ("the model", 1.0),
        *((f"the model, {part}", 64.0) for part in ("keys", "values")),
    ]
    assert all(row["chunks_lost"] == 0 and 0 < row["share"] < 1e-3 for row in rows)


def test_figures_of_counts():
    """Two chunks of three tiles; one tile has one number too many."""
    tile = PackedTile(32, 128)
    counts = [np.array([[0, 1, tile.num_places]]), np.array([[2, tile.num_places + 1, 0]])]
    found = measure_packing.counted(tile, counts)
    assert (found["num_tiles"], found["num_chunks"], found["largest"]) == (6, 2, tile.num_places + 1)
    assert (found["tiles_lost"], found["chunks_lost"]) == (1 / 6, 1 / 2)
    assert found["mean"] == pytest.approx((2 * tile.num_places + 4) / 6)


def test_escapes_are_those_of_the_packed_form():
    rows = jnp.ones((2, 16, 64), jnp.bfloat16).at[0, 3, 5].set(2.0**-40).at[0, 4, 6].set(0.0)
    assert measure_packing.num_escapes(rows).tolist() == [1, 0]
