"""BatchMaker's figures that need no load; the command names all of them."""

from __future__ import annotations

import json

import pytest

from tests.launching import load


@pytest.fixture
def reproduce(launch, capsys):
    """Run an experiment; returns what it printed and its results."""

    def reproduce(experiment, **flags):
        assert launch("reproduce", shared_llm=False, experiment=experiment, progress="false", **flags) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])["results"]

    return reproduce


def test_a_step_beside_what_is_committed(reproduce, tmp_path, monkeypatch):
    """Only documents of benchmark_cells.py and of LSTM are used."""
    points = [
        {"cell": "lstm", "batch_size": size, "num_tasks": num, "task_s": size * 1e-6 / num}
        for size in (64, 512)
        for num in (1, 5)
    ]
    peers = [{"peer": "cudnn", "batch_size": 64, "step_s": 5e-5}]
    setting = {"model": "lstm", "hidden_size": 1024, "dtype": "float32", "points": points, "peers": peers}
    for name, benchmark, model in (("a", "cells", "lstm"), ("b", "cells", "seq2seq"), ("c", "other", "lstm")):
        document = {"benchmark": benchmark, "hardware": {"device": "NVIDIA H200"}}
        text = json.dumps(document | {"results": setting | {"model": model}})
        (tmp_path / f"h200_cells_{name}.json").write_text(text)
    monkeypatch.setattr(load("pensieve_lab.experiments.committed"), "_RESULTS", tmp_path)
    plot = tmp_path / "steps.png"
    out, results = reproduce("cells2.3", plot=plot)
    assert results["steps"]["the thesis' V100"] == pytest.approx(
        {"64": 185e-6, "256": 470e-6, "512": 784e-6, "1024": 1568e-6, "2048": 3136e-6}
    )
    assert results["steps"]["H200, hidden size 1024, float32"] == pytest.approx(
        {"64": 64e-6 / 5, "512": 512e-6 / 5}
    )
    assert results["steps"]["cudnn, hidden size 1024, float32"] == {"64": 5e-5}
    assert results["documents"] == ["lab/results/h200_cells_a.json"]
    assert "the thesis' V100, by its text and measured on NVIDIA H200" in out
    assert plot.stat().st_size > 1000


def test_a_step_with_nothing_committed(reproduce, tmp_path, monkeypatch):
    monkeypatch.setattr(load("pensieve_lab.experiments.committed"), "_RESULTS", tmp_path)
    _, results = reproduce("cells2.3")
    assert list(results["steps"]) == ["the thesis' V100"] and results["documents"] == []


def test_the_requests_of_each_task(reproduce, tmp_path):
    plot = tmp_path / "joining.png"
    out, results = reproduce("cells2.5", plot=plot)
    cells, graphs = results["runs"]["cellular batching"], results["runs"]["graph batching"]
    assert cells["tasks"][2:4] == [[2.0, [2, 3, 4, 5]], [3.0, [4, 5, 6, 7]]]
    assert graphs["end_s"] == [5.0] * 4 + [12.0] * 4
    assert "2          2 3 4 5   2 3" in out
    assert plot.stat().st_size > 1000


def test_lengths_are_those_of_the_thesis(reproduce):
    _, results = reproduce("cells2.10", seeds=0)
    assert results["rows"]["mean"] == pytest.approx(24, abs=0.5) and results["rows"]["largest"] <= 330


def test_the_command_names_every_figure():
    names = [
        name for name in load("pensieve_lab.experiments.registry").EXPERIMENTS if name.startswith("cells")
    ]
    assert len(names) == 10
    assert not [name for name in names if name not in load("reproduce").__doc__]
