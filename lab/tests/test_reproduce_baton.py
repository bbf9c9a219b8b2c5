"""Baton's tables and figures on short sequences; the command names all of them."""

from __future__ import annotations

import json

import pytest

from pensieve_lab.rebatching.costs import RingCosts
from tests.launching import load


@pytest.fixture
def reproduce(launch, capsys):
    """Run an experiment; returns what it printed and its results."""

    def reproduce(experiment, **flags):
        assert launch("reproduce", shared_llm=False, experiment=experiment, progress="false", **flags) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])["results"]

    return reproduce


@pytest.mark.long
def test_four_methods_beside_the_paper(reproduce, tmp_path):
    plot = tmp_path / "table1.png"
    out, results = reproduce("baton-table1", small=True, seeds=0, plot=plot)
    points = {(one["batch"], one["method"]): one for one in results["points"]}
    assert list(points) == [
        (batch, name) for batch in (4, 8) for name in ("Benchmark", "PD", "Baton", "Baton-PD")
    ]
    for batch in (4, 8):
        steps = {name: points[batch, name]["steps"] for name in ("Benchmark", "PD", "Baton", "Baton-PD")}
        assert steps["Benchmark"] == steps["PD"] > steps["Baton"] > steps["Baton-PD"]
        assert points[batch, "Baton-PD"]["idle_row_share"] < 0.1
        assert points[batch, "Baton-PD"]["seconds"] >= points[batch, "Baton-PD"]["device_s"] > 0
    assert points[4, "PD"]["doubled"] and not points[8, "PD"]["doubled"]
    for figure in ("21,901", "21,781", "20,549", "11,771", "6,619", "6,577", "3,424", "2,654"):
        assert f"  {figure} " in out
    for figure in ("46.25", "45.98", "59.90", "59.64", "1.75", "1.29"):
        assert f"  {figure}" in out
    costs = RingCosts.load("h200_llama2-7b")
    assert f"simulated with {costs.source} costs of llama2-7b on {costs.device}, a small version" in out
    assert results["simulated"] and results["costs"]["model"] == "llama2-7b"
    assert plot.stat().st_size > 1000


def test_by_batch_size_beside_the_paper(reproduce, tmp_path):
    plot = tmp_path / "table2.png"
    out, results = reproduce("baton-table2", small=True, seeds="0,1", plot=plot)
    assert len(results["points"]) == 5 * 3 * 2
    for batch in (2, 4, 6, 8, 10):
        steps = {
            name: sum(
                one["steps"] for one in results["points"] if (one["batch"], one["method"]) == (batch, name)
            )
            for name in ("Benchmark", "Baton-PD")
        }
        assert 1.1 < steps["Benchmark"] / steps["Baton-PD"] < 2
    assert "161.77" in out and "30.99" in out and "1.94" in out
    assert plot.stat().st_size > 1000


@pytest.mark.long
@pytest.mark.parametrize("experiment", ["baton6", "baton7", "baton8"])
def test_over_time(reproduce, tmp_path, experiment):
    plot = tmp_path / "curves.png"
    _, results = reproduce(experiment, small=True, seeds=1, plot=plot)
    assert len(results["rows"]) == len(results["curves"]) == 5 * 2
    for curve in results["curves"]:
        assert curve["completed"][-1] == 30 and curve["completed"] == sorted(curve["completed"])
        assert curve["tokens"] == sorted(curve["tokens"]) and len(curve["time_s"]) <= 150
        pairs = zip(curve["span_bytes"], curve["kv_bytes"], strict=True)
        assert all(span <= allocated for span, allocated in pairs)
    by_method = {
        name: [one["time_s"][-1] for one in results["curves"] if one["method"] == name]
        for name in ("Benchmark", "Baton-PD")
    }
    assert all(a > b for a, b in zip(by_method["Benchmark"], by_method["Baton-PD"], strict=True))
    assert plot.stat().st_size > 1000


def test_claims_are_the_papers():
    """They equal the paper's quotients, except one that the paper rounds differently."""
    claims = {claim.id: claim.value for claim in load("pensieve_lab.experiments.claims").all_claims()}
    for batch in (2, 4, 6, 8, 10):
        ratio = claims[f"baton-table2-benchmark-{batch}"] / claims[f"baton-table2-baton-{batch}"]
        assert claims[f"baton-table2-gain-{batch}"] == pytest.approx(ratio, abs=0.025)
    for batch in (4, 8):
        ours = claims[f"baton-table1-baton-pd-{batch}"]
        for name in ("benchmark", "pd"):
            less = 100 * (1 - ours / claims[f"baton-table1-{name}-{batch}"])
            assert claims[f"baton-table1-less-{name}-{batch}"] == pytest.approx(less, abs=0.05)
        gain = claims[f"baton-table1-baton-{batch}"] / ours
        assert claims[f"baton-table1-gain-{batch}"] == pytest.approx(gain, abs=0.005)


def test_the_command_names_every_figure():
    names = [
        name for name in load("pensieve_lab.experiments.registry").EXPERIMENTS if name.startswith("baton")
    ]
    assert len(names) == 5
    assert not [name for name in names if name not in load("reproduce").__doc__]
