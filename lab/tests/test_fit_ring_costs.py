"""Fitting recovers the costs from which launches were computed."""

from __future__ import annotations

import json

import pytest

from pensieve_jax import ConfigError
from pensieve_jax.rebatching.ring_shapes import RingShape
from pensieve_lab.rebatching.costs import NUMBERS, RingCosts
from tests.launching import load

_TRUTH = {
    "weights_s": 0.0032,
    "column_s": 2e-7,
    "step_s": 0.001,
    "token_s": 3e-5,
    "pair_s": 2e-9,
    "insert_s": 0.0004,
    "insert_column_s": 5e-7,
    "take_column_s": 6e-7,
    "relayout_column_s": 9e-7,
    "copy_bytes_per_s": 4e10,
}


@pytest.fixture
def truth():
    return load("pensieve_lab.rebatching.fit_costs").with_numbers(RingCosts.load("h200_llama2-7b"), _TRUTH)


def document(costs: RingCosts, ring: RingShape, *, model: str = "random:llama2-7b") -> dict[str, object]:
    """Make a document as `benchmark_rebatching.py --part=steps` writes it."""
    row_bytes = ring.length * costs.token_bytes
    launches = [
        ("decode", *ring, costs.decode_of(ring), 0),
        ("take a row out", 1, ring.length, costs.take_of(ring.length), 0),
        ("insert a row", 1, ring.length, costs.insert_of(ring), 0),
        ("park a row", 1, ring.length, costs.copy_of(ring.length), row_bytes),
        ("bring a row back", 1, ring.length, costs.copy_of(ring.length), row_bytes),
        ("prefill", 1, ring.length, costs.prefill_of(1, ring.length), 0),
        ("prefill", 4, ring.length, costs.prefill_of(4, ring.length), 0),
        (f"from 1 x 2 to {ring.batch} x {ring.length}", *ring, costs.resize_of(ring, moves=True), 0),
    ]
    keys = ("launch", "batch", "length", "launch_s", "bound_bytes")
    rows = [dict(zip(keys, one, strict=True)) for one in launches]
    return {"hardware": {"device": "NVIDIA X"}, "results": {"model": model, "launches": rows}}


@pytest.fixture
def fitted(launch, tmp_path, capsys):
    """Fit documents; returns the profile, and what was printed."""

    def fitted(*documents, **flags):
        names = []
        for number, one in enumerate(documents):
            names.append(str(tmp_path / f"steps{number}.json"))
            (tmp_path / f"steps{number}.json").write_text(f"a table\n{json.dumps(one)}\n")
        output = tmp_path / "costs.json"
        launch("fit_ring_costs", shared_llm=False, documents=",".join(names), output=output, **flags)
        return RingCosts.load(output), capsys.readouterr().out

    return fitted


def test_rings_of_two_shapes_tell_everything(truth, fitted):
    shapes = (RingShape(8, 4096), RingShape(4, 8192), RingShape(8, 1024))
    found, out = fitted(*(document(truth, shape) for shape in shapes), host_s=0.007)
    for name, value in _TRUTH.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name
    assert (found.source, found.device, found.host_s) == ("measured", "NVIDIA X", 0.007)
    assert "+0.0" in out and "As in h200_llama2-7b: shaped_pair_s, host_s, fetch_s" in out
    assert {"launches", "host_s", "fetch_s", "shaped_pair_s"} <= set(found.provenance)
    assert "token_s" not in found.provenance


def test_one_shape_keeps_what_it_cannot_tell(truth, fitted):
    base = RingCosts.load("h200_llama2-7b")
    ring = RingShape(8, 8192)
    found, _ = fitted(document(truth, ring))
    assert found.weights_s + found.step_s == pytest.approx(base.weights_s + base.step_s)
    assert found.insert_s == base.insert_s
    assert found.decode_of(ring) == pytest.approx(truth.decode_of(ring), rel=1e-3)
    assert found.insert_of(ring) == pytest.approx(truth.insert_of(ring), rel=1e-3)
    assert all(getattr(found, name) >= 0 for name in NUMBERS)


def test_one_decode_changes_nothing_else(truth, fitted):
    one = document(truth, RingShape(8, 8192))
    del one["results"]["launches"][1:]
    found, _ = fitted(one)
    base = RingCosts.load("h200_llama2-7b")
    changed = {name for name in NUMBERS if getattr(found, name) != getattr(base, name)}
    assert changed == {"column_s"}


def test_what_cannot_be_fitted_is_refused(truth, fitted, tmp_path):
    with pytest.raises(ConfigError, match="documents of llama2-7b, the model of --base"):
        fitted(document(truth, RingShape(8, 8192), model="facebook/opt-125m"))
    with pytest.raises(ConfigError, match="--part=steps"):
        fitted({"results": {"model": "random:llama2-7b"}})
    with pytest.raises(ConfigError, match="whose last line is a JSON document"):
        fitted([1])
