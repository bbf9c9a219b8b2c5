"""The benchmark of padded batches, small: every part gives its document, and invalid runs are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from model_defs import preset
from pensieve_jax import ConfigError
from pensieve_jax.rebatching import RebatchingConfig
from pensieve_lab.workload import ConversationTrace, Trace, TurnTrace
from tests.launching import load

loads = load("pensieve_lab.rebatching.loads")
methods = load("pensieve_lab.rebatching.methods")
script = load("benchmark_rebatching")
TINY = {"dtype": "float32", "progress": "false", "shared_llm": False, "max_batch": 2, "lengths": "32"}
TINY |= {"prefill_batch": 1}
TINY_MODEL = preset("llama-tiny")
SHORT = {"length_scale": 0.05}


@pytest.fixture
def benchmark(launch, capsys, compilation_cache):
    """Run the benchmark; returns what it printed and its results."""

    def benchmark(**flags):
        assert launch("benchmark_rebatching", compilation_cache_dir=compilation_cache, **flags) == 0
        out = capsys.readouterr().out
        document = json.loads(out.splitlines()[-1])
        assert {"versions", "hardware", "command", "units"} <= document.keys()
        return out, document["results"]

    return benchmark


@pytest.mark.long
def test_every_method_serves_the_table(benchmark, tmp_path):
    plot = tmp_path / "figures.png"
    out, results = benchmark(part="table2", plot=plot, **TINY, **SHORT)
    points = {point["method"]: point for point in results["points"]}
    assert list(points) == ["Benchmark", "PD", "Baton", "Baton-PD"]
    load = loads.table2(0, 0.05)
    for name, point in points.items():
        assert point["digest"] == load.digest and point["num_queries"] == 30 and name in out
        series = point["series"]
        assert series["completed"][-1] == 30 and series["output_tokens"][-1] == load.output_tokens
        assert len(series["time_s"]) <= 200 and series["time_s"] == sorted(series["time_s"])
        assert max(series["spanned_bytes"]) <= max(series["allocated_bytes"]) <= 2**30
        assert 0 < point["latency_s"]["all"]["p50"] <= point["seconds"]
        assert point["stats"]["num_compilations"] == 0
        relayouts = point["relayouts"]
        counts = [kind["count"] for kind in relayouts["kinds"]]
        assert relayouts["count"] == point["stats"]["num_resizes"] == sum(counts)
        assert relayouts["seconds"] > 0
        assert relayouts["share_of_run"] == pytest.approx(relayouts["seconds"] / point["seconds"])
    assert points["Baton-PD"]["steps"] < points["Benchmark"]["steps"]
    assert points["Baton-PD"]["fewer_steps"] > 1 == points["Benchmark"]["fewer_steps"]
    assert points["Baton-PD"]["idle"]["waiting"] < points["Benchmark"]["idle"]["waiting"]
    assert points["Baton"]["stats"]["num_shaped_steps"] > 0 == points["Baton-PD"]["stats"]["num_shaped_steps"]
    assert plot.stat().st_size > 1000


@pytest.mark.long
def test_changes_of_shape_are_done_again_alone(benchmark):
    """A ring of two lengths is resized in the run, and the memory of every kind of ring is reported."""
    two = TINY | {"lengths": "32,64", "length_scale": 0.1}
    _, results = benchmark(part="table2", methods="Baton-PD", **two)
    (point,) = results["points"]
    moved = [kind for kind in point["relayouts"]["kinds"] if kind["from"] is not None]
    assert moved and all(kind["from"] != kind["to"] and kind["launch_s"] > 0 for kind in moved)
    assert point["relayouts"]["kinds"][0]["from"] is None, "the first ring is a new one"
    memory = results["memory"]
    (runner,) = memory["runners"]
    assert runner["insertion"] == "embed"
    assert 0 < runner["max_kv_bytes"] == point["stats"]["max_kv_bytes"] <= runner["kv_bytes"] == 2**30
    heads = TINY_MODEL.num_kv_heads * TINY_MODEL.head_dim
    assert runner["layer_bytes"] == 2 * 64 * heads * 4, "keys of two rows of the longest ring"
    assert runner["temporary_bytes"]["decode"] > 0 and "shape" not in runner["temporary_bytes"]


@pytest.mark.long
def test_several_seeds_and_budgets_are_told_together(benchmark, tmp_path):
    """What the others lose is the extra latency of their own queries with preemption, one by one."""
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n9,12\n5,8\n300,9\n")
    flags = {"part": "load", "trace": trace, "rates": "300", "seconds": 0.1, "share_urgent": 0.3}
    flags |= {"seeds": "0,1,2", "kv_bytes": "200KiB,100KiB", "max_context_tokens": 30, "prefill_batch": 1}
    file = tmp_path / "points.jsonl"
    out, results = benchmark(**TINY | flags, output_json=file)
    points = results["points"]
    names = ["Benchmark", "Baton-PD", "Baton-PD, preemptive"]
    assert [(point["kv_bytes"] >> 10, point["seed"]) for point in points[::3]] == [
        (kib, seed) for kib in (200, 100) for seed in (0, 1, 2)
    ]
    assert len({point["digest"] for point in points}) == 3, "one load of each seed for all"
    assert all(point["stats"]["max_kv_bytes"] <= point["kv_bytes"] for point in points)
    rows = results["pooled"]
    assert [(row["kv_bytes"] >> 10, row["method"]) for row in rows] == [
        (kib, name) for kib in (200, 100) for name in names
    ]
    assert rows[1]["lost"] is None and rows[1]["seeds"] == [0, 1, 2]
    plain, preemptive = (points[index:9:3] for index in (1, 2))
    kinds = np.concatenate([point["queries"]["priority"] for point in plain])
    one, other = (
        np.concatenate([point["queries"]["latency_s"] for point in some]) for some in (plain, preemptive)
    )
    counts = {"all": len(kinds), "priority 0": (kinds == 0).sum(), "priority 1": (kinds == 1).sum()}
    assert rows[2]["num_queries"] == counts and counts["priority 1"] > 0
    tail_s = np.percentile(one[kinds == 1], 99)
    assert rows[1]["latency_s"]["priority 1"]["p99"] == pytest.approx(tail_s, abs=1e-4)
    assert rows[2]["lost"]["mean_s"] == pytest.approx((other - one)[kinds == 0].mean())
    assert [runner["kv_bytes"] >> 10 for runner in results["memory"]["runners"]] == [200, 100]
    assert "others lose, s" in out
    assert len(file.read_text().splitlines()) == len(points), "each as it is done"


@pytest.mark.long
def test_a_load_tells_the_urgent_apart(benchmark, tmp_path):
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n9,12\n5,8\n300,9\n")
    flags = {"part": "load", "trace": trace, "rates": "300", "seconds": 0.1, "share_urgent": 0.3}
    out, results = benchmark(**flags, max_context_tokens=30, **TINY)
    points = results["points"]
    assert [point["method"] for point in points] == ["Benchmark", "Baton-PD", "Baton-PD, preemptive"]
    assert len({point["digest"] for point in points}) == 1
    for point in points:
        latency = point["latency_s"]
        assert latency.keys() == {"all", "priority 0", "priority 1"}
        assert all(0 < one["p50"] <= one["p99"] for one in latency.values())
        assert point["first_token_s"]["all"]["p50"] <= latency["all"]["p50"]
    assert "urgent p99, s" in out


@pytest.mark.long
def test_launches_are_timed(benchmark, monkeypatch):
    module = load("pensieve_lab.rebatching.launch_times")
    monkeypatch.setattr(module, "_LAUNCHES", 1)
    monkeypatch.setattr(module, "_SAMPLES", 2)
    flags = {"part": "steps", "batch": 2, "length": 128, "copy_bytes": "1MiB", "matrix_size": 64}
    out, results = benchmark(dtype="float32", progress="false", shared_llm=False, prefill_batch=1, **flags)
    launches = {(one["launch"], one["length"]): one for one in results["launches"]}
    of_rows = {"take a row out", "insert a row", "park a row", "bring a row back", "prefill"}
    expected = {(name, length) for name in of_rows for length in (32, 64, 128)}
    assert launches.keys() == expected | {("decode", 128), ("from 2 x 64 to 2 x 128", 128)}
    assert all(one["bound_bytes"] > 0 and one["bound_s"] > 0 for one in launches.values())
    weights_bytes, token_bytes = (
        results["memory"]["weights_bytes"],
        results["memory"]["kv_bytes"] // (3 * 128),
    )
    assert launches["decode", 128]["bound_bytes"] == weights_bytes + 2 * 128 * token_bytes
    assert launches["insert a row", 64]["bound_bytes"] == 2 * 64 * token_bytes
    assert launches["decode", 128]["launch_s"] > 0 and "bring a row back" in out


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"methods": "no such"}, "--methods is 'no such', but must be one of: Benchmark; PD"),
        ({"max_batch": "2,x"}, "--max_batch is '2,x', but must be numbers of at least 1"),
        ({"seeds": "-1"}, "--seeds is '-1', but must be numbers of at least 0"),
        (
            {"part": "load", "rates": "0", "trace": __file__},
            "--rates is '0', but must be numbers of at least",
        ),
        ({"part": "load"}, "--trace is None, but must be a file of lengths"),
        ({"part": "load", "trace": "nowhere.csv"}, "--trace is 'nowhere.csv', but must be a file that can"),
        ({"part": "steps", "length": 200}, "--length is 200, but must be a multiple of 128"),
        ({"part": "steps", "kv_bytes": "1KiB"}, "--kv_bytes is '1KiB', but must be at least"),
        ({"part": "steps", "plot": "a.png"}, "--plot is 'a.png', but must be left out for --part=steps"),
        ({"kv_bytes": "much"}, "--kv_bytes is 'much', but must be a number of bytes"),
    ],
)
def test_what_cannot_be_run(launch, flags, match):
    with pytest.raises(ConfigError, match=match):
        launch("benchmark_rebatching", **(TINY | SHORT | flags))


def test_loads_are_those_of_the_paper():
    load = loads.table1(3)
    assert len(load.queries) == 120 and load.digest == loads.table1(3).digest != loads.table1(4).digest
    long = [(one.prompt_tokens > 1000, one.output_tokens > 1000) for one in load.queries]
    assert [long.count(kind) for kind in ((True, False), (False, True), (False, False))] == [30, 30, 60]
    assert long != sorted(long, reverse=True), "in no order"
    doubled = loads.table1(3, doubled=True)
    for one, twice in zip(load.queries, doubled.queries, strict=True):
        assert abs(twice.prompt_tokens - 2 * one.prompt_tokens) <= 1
    short = loads.table2(0)
    assert len(short.queries) == 30
    assert all(32 <= tokens <= 266 for one in short.queries for tokens in one[:2])
    prompts = short.prompts(50)
    assert [len(one) for one in prompts] == [one.prompt_tokens for one in short.queries]
    assert prompts == loads.table2(0).prompts(50) and max(map(max, prompts)) < 50


def test_arrivals_move_with_the_rate():
    turns = [TurnTrace(num, 2 * num) for num in (5, 7, 900)]
    trace = Trace("t", tuple(ConversationTrace(str(i), (turn,)) for i, turn in enumerate(turns)))

    def poisson(**changes):
        wanted = {"rate": 10, "seconds": 100, "seed": 1, "max_context_tokens": 100} | changes
        return loads.poisson(trace, **wanted).queries

    queries = poisson()
    assert 800 < len(queries) < 1200 and {one.prompt_tokens for one in queries} == {5, 7}
    assert 20 < sum(one.priority for one in queries) < 100
    faster = poisson(rate=20, seconds=50)
    assert [one[:2] for one in faster] == [one[:2] for one in queries]
    assert [round(2 * one.arrival_s, 6) for one in faster] == [round(one.arrival_s, 6) for one in queries]
    assert poisson(seconds=10) == queries[: len(poisson(seconds=10))]
    with pytest.raises(ConfigError, match="max_context_tokens is 3, but must be long enough"):
        poisson(max_context_tokens=3)


def test_methods_share_what_can_be_shared():
    base = RebatchingConfig(max_batch=4, kv_bytes=2**30, max_context_tokens=100)
    configs = {name: methods.config_of(name, base) for name in methods.METHODS}
    shared = {methods.runner_config(config) for name, config in configs.items() if name != "Baton"}
    assert len(shared) == 1 and methods.runner_config(configs["Baton"]) not in shared
    lengths = configs["Baton"].lengths
    assert lengths[: lengths.index(128) + 1] == tuple(methods.lengths_for(base, 100))
    assert lengths[-1] >= 199 and list(lengths) == sorted(set(lengths))
    given = methods.config_of("Baton", RebatchingConfig(lengths=(64, 96), max_context_tokens=90))
    assert given.lengths == (64, 96)
