"""Benchmarks of cells, small: every system answers, and impossible measurements are refused at once."""

from __future__ import annotations

import gc
import json

import jax
import numpy as np
import pytest

from model_defs.recurrent import LSTM
from pensieve_jax import ConfigError
from pensieve_jax.cellular import CellularConfig, CellularEngine, LaunchFailedError
from tests.launching import load
from tests.models.recurrent.plain import plain

TINY = {"hidden_size": 4, "max_batch": 2, "num_rows": 64, "max_num_tasks": 1, "progress": "false"}
LOAD = TINY | {"rates": "100", "seconds": 0.01}


@pytest.fixture
def benchmark(launch, capsys, monkeypatch, compilation_cache):
    """Run a benchmark with few requests; returns what it printed and its document."""
    monkeypatch.setattr(load("pensieve_lab.cells.whole_sentences"), "LENGTHS", (8, 330))

    def benchmark(script, **flags):
        flags = {"compilation_cache_dir": compilation_cache} | flags
        assert launch(script, shared_llm=False, **flags) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])

    return benchmark


@pytest.fixture
def few(monkeypatch):
    """Limit the requests of a load."""
    module = load("benchmark_cellular")
    monkeypatch.setattr(module, "_MIN_REQUESTS", 20)
    monkeypatch.setattr(module, "_WARM_UP", 3)


@pytest.mark.long
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("model", "flags", "expected"),
    [
        (
            "lstm",
            {"num_words": 5},
            ["cellular", "padding, width 10", "padding, oldest first", "padding, scan"],
        ),
        pytest.param(
            "seq2seq",
            {},
            ["cellular", "padding, width 10", "padding, oldest first"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "tree_lstm", {}, ["cellular", "merging by agenda", "merging by depth"], marks=pytest.mark.long
        ),
    ],
)
def test_every_system_answers(benchmark, tmp_path, model, flags, expected):
    plot = tmp_path / "loads.png"
    out, document = benchmark("benchmark_cellular", model=model, plot=plot, **LOAD, **flags)
    assert {"versions", "hardware", "command", "units"} <= document.keys()
    points = document["results"]["points"]
    assert [point["system"] for point in points] == expected
    for point in points:
        assert point["num_requests"] == 20
        assert 0 <= point["queueing_s"]["p50"] <= point["latency_s"]["p50"]
        assert ("planning_s" in point) == (point["system"] not in ("cellular", "padding, scan"))
        assert point["system"] in out
    assert plot.stat().st_size > 1000


def test_two_files_of_sentences(tmp_path):
    """The lengths are those of the second of two parallel files."""
    for name, text in (("a.de", "eins zwei drei\nvier\n"), ("a.en", "one two\nthree four five six\n")):
        (tmp_path / name).write_text(text)
    make = load("pensieve_lab.cells.models").make
    options = {"hidden_size": 4, "dtype": "float32", "max_batches": [2], "num_words": None}
    files = [tmp_path / "a.de", tmp_path / "a.en"]
    model = make("lstm", data=files, **options)
    assert {len(one.token_ids) for one in model.requests(50, 0)} == {2, 4}
    model = make("seq2seq", data=files, **options)
    pairs = {(len(one.source_ids), one.num_steps) for one in model.requests(50, 0)}
    assert pairs == {(3, 2), (1, 4)}
    with pytest.raises(ConfigError, match=r"--data is .*c.de', but must be a file"):
        make("lstm", data=[tmp_path / "c.de"], **options)
    with pytest.raises(ConfigError, match="--num_words is 3, but must be absent with --data"):
        make("lstm", data=files, **(options | {"num_words": 3}))
    with pytest.raises(ConfigError, match=r"--data.*at most 1 files, for tree_lstm"):
        make("tree_lstm", data=files, **options)


def test_tasks_and_the_host_are_timed(benchmark, monkeypatch):
    monkeypatch.setattr(load("pensieve_lab.cells.task_times"), "_LAUNCHES", 2)
    module = load("benchmark_cells")
    monkeypatch.setattr(module, "_LOADS", ((2, 1),))
    monkeypatch.setattr(module, "_LIBRARY_BATCHES", (2,))
    flags = {name: TINY[name] for name in ("hidden_size", "max_batch", "num_rows", "progress")}
    out, document = benchmark("benchmark_cells", **flags)
    points = document["results"]["points"]
    assert {(one["batch_size"], one["num_tasks"]) for one in points} == {
        (size, num) for size in (1, 2) for num in (1, 2, 5)
    }
    assert all(one["task_s"] > 0 and one["dispatch_s"] > 0 for one in points)
    (host,) = document["results"]["host"]
    assert host["form_s"] > 0 and host["complete_s"] > 0 and host["submit_s"] > 0
    assert "The host, with a device that takes no time" in out


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"systems": "no such"}, r"--systems is 'no such'.*cellular; padding, width 10"),
        ({"systems": "ideal, fixed graph"}, "--systems is 'ideal, fixed graph'"),
        ({"num_words": 331}, "--num_words is 331, but must be at most 330 words"),
        ({"num_rows": 1}, "--num_rows is 1, but must be at least 2, the largest batch"),
        ({"rates": "10,x"}, "--rates is '10,x', but must be numbers above 0"),
        ({"max_batch": "2,2"}, "--max_batch.*one for each of lstm"),
    ],
)
def test_what_cannot_be_measured(launch, flags, match):
    with pytest.raises(ConfigError, match=match):
        launch("benchmark_cellular", shared_llm=False, model="lstm", **(LOAD | flags))


def test_whole_sentences_are_what_a_loop_computes(monkeypatch):
    """Batches may be padded, incomplete, and in buckets of any width."""
    module = load("pensieve_lab.cells.whole_sentences")
    monkeypatch.setattr(module, "LENGTHS", (4, 12))
    model = LSTM.random(hidden_size=4, vocab_size=9, seed=0)
    whole = module.WholeSentences(model, (2, 4), shown=False)
    rng = np.random.default_rng(0)
    sentences = [rng.integers(0, 9, size, dtype=np.int32) for size in (3, 1, 12, 4, 5, 2, 7)]
    for some in (sentences[:1], sentences[:3], sentences[3:]):
        expected = [plain(model)(model.request(one))[1] for one in some]  # "h", behind "c"
        np.testing.assert_allclose(whole.run(some), expected, atol=1e-6)
    arrival_s = np.linspace(0, 0.005, len(sentences))
    for width in (1, 100):
        served = whole.serve(sentences, arrival_s, width=width)
        assert (served.arrival_s <= served.begin_s).all() and (served.begin_s <= served.end_s).all()
    with pytest.raises(ConfigError, match="the longest sentence is 13, but must be at most 12 words"):
        whole.run([np.zeros(13, np.int32)])
    with pytest.raises(ConfigError, match="the longest sentence is 13, but must be at most 12 words"):
        whole.serve([np.zeros(13, np.int32)], np.zeros(1), width=10)


def _broken(*_):
    raise jax.errors.JaxRuntimeError("INTERNAL: planted")


@pytest.fixture
def thaws(monkeypatch):
    """Count the calls of `gc.unfreeze`; see `conftest`."""
    found = []
    monkeypatch.setattr(gc, "unfreeze", lambda: found.append(None))
    return found


def test_a_request_that_fails_is_no_answer(thaws):
    """A failed request ends the benchmark and leaves the process unchanged."""
    real_time, model = load("pensieve_lab.cells.real_time"), LSTM.random(hidden_size=4, vocab_size=9, seed=0)
    beginnings = real_time.BeginTimes()
    config = CellularConfig(num_rows=16, max_num_tasks=1, compile_at_start=True)
    with CellularEngine(
        model.cells(max_batch=2), model.unfold, config, observe=beginnings.observe, progress=False
    ) as engine:
        (worker,) = engine.workers
        worker.programs.compiled = dict.fromkeys(worker.programs.compiled, _broken)
        requests = [model.request([1, 2, 3])] * 4
        with pytest.raises(LaunchFailedError, match="planted"):
            real_time.serve(engine, requests, np.zeros(4), beginnings)
    assert len(thaws) == 1


def test_whole_sentences_that_fail_leave_the_process_as_it_was(monkeypatch, thaws):
    module = load("pensieve_lab.cells.whole_sentences")
    monkeypatch.setattr(module, "LENGTHS", (4,))
    whole = module.WholeSentences(LSTM.random(hidden_size=4, vocab_size=9, seed=0), (2,), shown=False)
    monkeypatch.setattr(whole, "_launch", _broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
        whole.serve([np.ones(3, np.int32)], np.zeros(1), width=1)
    assert len(thaws) == 1


def test_most_is_what_was_answered_at_any_load(monkeypatch):
    """A baseline that never keeps up counts as well; a system that keeps up with the highest load may do
    more."""
    module = load("pensieve_lab.pages.cells_measured")

    def point(system, rate, throughput):
        times = {"latency_s": {"p90": 2.0}, "queueing_s": {"p99": 1.0}}
        return {"system": system, "rate": rate, "throughput": throughput} | times

    points = [
        point("a", 10, 9),
        point("a", 20, 15),
        point("a", 30, 14),
        point("b", 30, 29.5),
        point("b", 10, 10),
    ]
    monkeypatch.setattr(module, "committed_document", lambda _: {"results": {"points": points}})
    assert [str(module._most(module._loads(("x",), one))) for one in ("a", "b")] == ["15", "at least 30"]
