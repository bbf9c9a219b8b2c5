"""The serving benchmark's program: every system answers every turn, and invalid flags are refused."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from lab.tests.serving_fakes import NullFactory
from model_defs import preset
from pensieve_jax import ConfigError
from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.device.kv_storage import chunk_bytes
from pensieve_lab.serving.host_parts import PARTS
from pensieve_lab.workload import SHAREGPT, ConversationTrace, Trace, TurnTrace, generate_trace
from tests.launching import load

script = load("benchmark_serving")
serving_engine = load("pensieve_lab.serving.engine_server")
Lag = load("pensieve_lab.serving.client").Lag
documents = load("pensieve_lab.pages.result_documents")

# Memory for a part of the conversations, so that every system has something to evict.
MEMORY = {"gpu_pages": 24, "cpu_pages": 24, "chunk_tokens": 16, "max_num_staged_pages": 4}
STEPS = {
    "model": "random:llama-tiny", "dtype": "float32", "token_buckets": 64, "max_num_running": 8,
    "progress": "false",
}  # fmt: skip
CLOSED = {
    "closed_loop": "true", "num_conversations": 6, "num_turns": 3, "prompt_tokens": 12, "output_tokens": 12,
}  # fmt: skip
OPEN = {
    "max_context_tokens": 300, "rates": "6", "think": "exponential:0.5",
    "mid_life_s": 20, "warm_up_s": 0.2, "window_s": 1, "drain_s": 20,
    "max_client_lag_s": 1e6,  # a test's machine may be as slow as it likes
}  # fmt: skip


@pytest.fixture
def benchmark(launch, capsys, monkeypatch):
    """Run it on engines that compute nothing, or `real` ones; returns its output and its document."""

    def benchmark(*, real=False, status=0, **flags):
        if not real:
            monkeypatch.setattr(serving_engine, "EngineFactory", NullFactory)
        given = MEMORY | STEPS | flags
        assert launch("benchmark_serving", shared_llm=False, **given) == status
        out = capsys.readouterr().out
        document = json.loads(out.splitlines()[-1])
        if "curves" not in document["results"] and status == 0:  # a run that failed may have no load point
            command = shlex.join(
                ["lab/pensieve_lab/programs/benchmark_serving.py", *(f"--{n}={v}" for n, v in given.items())]
            )
            faults = list(documents.request_faults(document["results"], command))
            assert faults == [], "its summary is that of its requests, and its settings those of its command"
        return out, document

    return benchmark


@pytest.fixture
def conversations(tmp_path) -> dict[str, str]:
    """Return the flags of a trace of many short turns."""
    turns = (TurnTrace(20, 10),) * 6
    trace = Trace("many turns", tuple(ConversationTrace(f"c{i}", turns) for i in range(50)))
    trace.save(tmp_path / "turns.jsonl")
    return OPEN | {"trace": str(tmp_path / "turns.jsonl")}


@pytest.mark.long
@pytest.mark.parametrize(
    "system",
    ["pensieve", *(pytest.param(one, marks=pytest.mark.long) for one in ("pensieve-gpu", "stateless"))],
)
def test_a_closed_loop_on_a_model(benchmark, compilation_cache, system):
    """Every conversation takes every turn, with the requested number of tokens."""
    flags = CLOSED | {"system": system, "compilation_cache_dir": compilation_cache}
    out, document = benchmark(real=True, **flags)
    assert {"versions", "hardware", "command", "units"} <= document.keys()
    results = document["results"]
    (point,) = results["points"]
    assert point["num_requests"] == 6 * 3 and point["output_tokens"] == 6 * 3 * 12
    assert point["num_unfinished"] == point["num_refused"] == point["num_compilations"] == 0
    assert point["history_tokens"] == 6 * (23 + 47), "all but the last token of every history"
    found = point["gpu_hit_rate"] + point["cpu_hit_rate"]
    lost = point["recomputed_tokens"] / point["history_tokens"]
    assert found + lost == pytest.approx(1.0)
    if system == "stateless":
        assert lost == 1.0
    else:
        assert 0 < point["gpu_hit_rate"] < 1 and (point["cpu_hit_rate"] > 0) == (system == "pensieve")
    assert (point["swapped_in_bytes"] > 0) == (system == "pensieve")
    assert results["config"]["stateful"] == (system != "stateless")
    assert results["system"] == system and len(results["trace"]["digest"]) == 64
    assert len(point["sessions_digest"]) == 64 and results["left_out"] == []
    assert results["kv_bytes"] == 24 * chunk_bytes(preset("llama-tiny"), 16, np.dtype("float32"))
    assert sum(bucket["num_steps"] for bucket in point["steps"].values()) >= point["num_steps"] - 1
    assert point["host_step_s"] > 0 and point["dispatch_step_s"] > 0
    assert "GB in" in out and "host ms/step" in out


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        ({}, "pensieve"),
        ({"policy": "lru"}, "pensieve, lru eviction"),
        ({"policy": "conversation"}, "pensieve, conversation eviction"),
        ({"policy": "trailing"}, "pensieve, trailing eviction"),
        ({"unified": "false"}, "pensieve, not unified"),
        ({"prefetch": "false"}, "pensieve, no prefetch"),
        ({"retrieval_priority": "false"}, "pensieve, no retrieval priority"),
        ({"system": "stateless", "policy": "lru", "prefetch": "false"}, "stateless"),
        ({"system": "pensieve-gpu", "policy": "lru"}, "pensieve-gpu, lru eviction"),
    ],
)
def test_ablations_answer_everything(benchmark, flags, label):
    _, document = benchmark(**CLOSED, **flags)
    results = document["results"]
    assert results["system"] == label and results["points"][0]["output_tokens"] == 6 * 3 * 12


def test_documents_stand_beside_each_other(benchmark, launch, capsys, tmp_path):
    """Two systems served the same load on the same memory; the third served another."""
    file = tmp_path / "points.json"
    for flags in ({}, {"system": "stateless"}):
        benchmark(**CLOSED | {"output_json": file} | flags)
    assert launch("compare_serving", shared_llm=False, documents=file) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["system"] for row in results["rows"]] == list(results["systems"]) == ["pensieve", "stateless"]
    assert all(system["config"] and system["kv_bytes"] for system in results["systems"].values())
    benchmark(**CLOSED | {"output_json": file, "system": "pensieve-gpu", "output_tokens": 13})
    with pytest.raises(ConfigError, match=r"line 3', but must be of the same trace\.name as"):
        launch("compare_serving", shared_llm=False, documents=file)


@pytest.mark.long
def test_several_load_points_in_real_time(benchmark, conversations, tmp_path):
    """Each begins with only the histories of its own conversations in the cache."""
    pytest.importorskip("matplotlib")
    file, plot, curves = (tmp_path / name for name in ("points.json", "plot.png", "curves.png"))
    wide = {"gpu_pages": 600, "cpu_pages": 100, "output_json": file, "plot": plot}
    _, document = benchmark(**conversations | wide | {"rates": "4,6"})
    results = document["results"]
    assert results["loop"] == "open loop" and results["settings"]["think"] == "exponential:0.5"
    assert [point["rate"] for point in results["points"]] == [4.0, 6.0]
    for point in results["points"]:
        assert point["num_mid_life"] > 0 and point["num_requests"] > 0 == point["num_unfinished"]
        assert point["history_tokens"] > 0 and point["gpu_hit_rate"] == 1.0, "memory suffices for all"
        assert not point["void"] and point["client_lag_s"]["max"] >= 0
        assert point["seconds"] == pytest.approx(1.0) and point["num_compilations"] is not None
    lines = [json.loads(line)["results"] for line in file.read_text().splitlines()]
    assert [line["points"] for line in lines] == [[point] for point in results["points"]]
    assert plot.read_bytes().startswith(b"\x89PNG")
    flags = {"curves": file, "plot": curves}
    _, document = benchmark(**flags)
    assert len(document["results"]["curves"]["pensieve"]) == 2
    assert curves.read_bytes().startswith(b"\x89PNG")


def test_systems_take_turns_on_one_model(benchmark, conversations, tmp_path, monkeypatch):
    """The model is loaded once, with both tiers; a system reuses what its own memory can hold, or nothing."""
    file, factories = tmp_path / "points.json", []

    class Factory(NullFactory):
        def __init__(self, config):
            super().__init__(config)
            factories.append(config)

    monkeypatch.setattr(serving_engine, "EngineFactory", Factory)
    loads = "stateless:6,pensieve:6,pensieve-gpu:6,stateless:4"
    flags = conversations | {"output_json": file, "window_s": 0.3, "gpu_pages": 600, "loads": loads}
    _, document = benchmark(real=True, **{name: flags[name] for name in flags if name != "rates"})
    (config,) = factories
    assert config.cache.cpu_pages and config.stateful
    systems = {one["system"]: one for one in document["results"]["systems"]}
    assert [len(one["points"]) for one in systems.values()] == [1, 1, 2]
    assert list(systems) == ["pensieve", "pensieve-gpu", "stateless"]
    configs = {name: one["config"] for name, one in systems.items()}
    assert {name: one["cache"]["cpu_pages"] > 0 for name, one in configs.items()} == {
        "pensieve": True, "pensieve-gpu": False, "stateless": False,
    }  # fmt: skip
    assert [one["stateful"] for one in configs.values()] == [True, True, False]
    assert systems["pensieve"]["points"][0]["gpu_hit_rate"] == 1.0
    assert {point["gpu_hit_rate"] for point in systems["stateless"]["points"]} == {0.0}
    lines = [json.loads(line)["results"] for line in file.read_text().splitlines()]
    assert [(line["system"], line["points"][0]["rate"]) for line in lines] == [
        ("stateless", 6.0), ("pensieve", 6.0), ("pensieve-gpu", 6.0), ("stateless", 4.0),
    ]  # fmt: skip


@pytest.mark.long
def test_every_rate_for_every_seed_with_recorded_pauses(benchmark, conversations, tmp_path, monkeypatch):
    """All systems get the same load: points differ by seed, and the document names the arrivals."""
    arrivals = tmp_path / "azure.csv"
    times = (0.0, 0.1, 0.2, 2.0, 2.1)
    rows = [f"2023-11-16 18:15:{46 + time_s:.2f},5,5" for time_s in times]
    arrivals.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    wide = {"gpu_pages": 600, "cpu_pages": 100, "mid_life_s": 0, "window_s": 0.5}
    flags = conversations | wide | {"rates": "8,12", "seeds": "3,4"}
    _, document = benchmark(**flags)
    points = [(point["seed"], point["rate"], point["arrivals"]) for point in document["results"]["points"]]
    assert points == [(3, 8.0, None), (3, 12.0, None), (4, 8.0, None), (4, 12.0, None)]
    _, document = benchmark(**flags | {"rates": "8", "seeds": "3", "arrivals": f"poisson,{arrivals}"})
    poisson, recorded = document["results"]["points"]
    assert recorded["arrivals"] == str(arrivals) and poisson["arrivals"] is None
    assert recorded["num_requests"] != poisson["num_requests"]
    measured, measure = [], script.measure
    monkeypatch.setattr(script, "measure", lambda *given: (measured.append(1), measure(*given))[1])
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: len(measured)))
    out, document = benchmark(**flags | {"max_run_s": 0.3})  # the first point takes a second of this clock
    assert len(document["results"]["points"]) == 1 and "3 load points left out" in out
    assert document["results"]["left_out"] == [
        {"rate": rate, "seed": seed, "arrivals": None} for seed, rate in ((3, 12.0), (4, 8.0), (4, 12.0))
    ]
    for flags, match in (
        ({"seeds": "a"}, "--seeds is 'a', but must be numbers from 0 on"),
        ({"arrivals": "/nowhere/x.csv"}, "--arrivals is '/nowhere/x.csv', but must be a file that can"),
        ({"arrivals": arrivals, "recorded_arrivals": "true", "rates": None}, "--arrivals is '.*left out be"),
        ({"arrivals": ""}, "--arrivals is '', but must be poisson or files"),
        ({"padded_lengths": "x", "system": "rebatching"}, "--padded_lengths is 'x', but must be numbers"),
    ):
        given = {name: value for name, value in (conversations | flags).items() if value is not None}
        with pytest.raises(ConfigError, match=match):
            benchmark(**given)


def test_a_run_without_time_for_a_point_has_failed(benchmark, conversations, tmp_path):
    """Its documents list the missing points."""
    file = tmp_path / "points.json"
    flags = conversations | {"rates": "4,6", "max_run_s": 0, "output_json": file, "plot": tmp_path / "a.png"}
    out, document = benchmark(status=1, **flags)
    results = document["results"]
    assert not results["points"] and "2 load points left out" in out
    assert results["left_out"] == [{"rate": rate, "seed": 0, "arrivals": None} for rate in (4.0, 6.0)]
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["results"] == results


def test_a_row_of_every_step(benchmark, conversations, tmp_path):
    """The table's sums equal the document's; several load points, or other engines, have no table."""
    path = tmp_path / "steps.npz"
    _, document = benchmark(**conversations, step_table=path)
    (point,) = document["results"]["points"]
    with np.load(path) as file:
        steps = dict(zip(file["columns"], file["steps"].T, strict=True))
    assert steps["tokens"].sum() >= point["num_steps"] and set(steps["bucket"]) == {64.0}
    assert steps["submitted"].sum() >= steps["answered"].sum() >= point["num_requests"] > 0
    assert steps["chunks_out"].sum() > 0 and steps["follows"].any() and (steps["dispatch_s"] > 0).all()
    assert set(point["host_parts_s"]) == set(PARTS) and min(point["host_parts_s"].values()) >= 0
    assert 0 < sum(point["host_steps_by_ms"].values()) <= point["num_steps"] and point["num_late_steps"] > 0
    for flags in ({"rates": "4,6"}, {"system": "vllm"}, {"step_table": tmp_path / "steps.csv"}):
        with pytest.raises(ConfigError, match="--step_table"):
            benchmark(**conversations | {"step_table": path} | flags)


@pytest.mark.long
def test_steps_of_a_run_and_the_same_alone(benchmark, conversations):
    """Without a GPU no kernels are traced; plans are recorded, and launched again."""
    flags = conversations | {"token_buckets": "16,64", "profile_steps": 40, "real": True}
    _, document = benchmark(**flags)
    (point,) = document["results"]["points"]
    found = point["profile"]
    assert found["num_steps"] == 40 and 0 < found["num_bucket_steps"] <= 40 and found["bucket"] == 16
    assert 1 <= found["query_tokens"] <= 16 and found["kv_tokens"] >= found["query_tokens"]
    assert "loop" not in found and "profile" in document["units"]
    for changed in ({"rates": "4,6"}, {"system": "vllm"}):
        with pytest.raises(ConfigError, match="--profile_steps"):
            benchmark(**flags | changed)
    with pytest.raises(ConfigError, match="--profile_steps"):
        benchmark(**CLOSED, profile_steps=40)


def test_a_stateless_server_in_mid_life_computes_its_histories(benchmark, conversations):
    _, document = benchmark(**conversations, system="stateless")
    (point,) = document["results"]["points"]
    assert point["num_mid_life"] > 0
    assert point["recomputed_tokens"] == point["history_tokens"] > 0


def test_histories_beyond_both_tiers_are_dropped_as_they_would_be(benchmark, conversations):
    _, document = benchmark(**conversations | {"gpu_pages": 30, "cpu_pages": 4})
    (point,) = document["results"]["points"]
    assert point["recomputed_tokens"] > 0 and point["gpu_hit_rate"] < 1


def test_late_users_make_a_run_void(benchmark, conversations, tmp_path):
    file = tmp_path / "points.json"
    flags = conversations | {"max_client_lag_s": 1e-9, "output_json": file, "mid_life_s": 0}
    out, document = benchmark(status=1, **flags)
    assert "VOID: users were" in out and document["results"]["points"][0]["void"]
    with pytest.raises(ConfigError, match="not void"):
        benchmark(curves=file, plot=tmp_path / "curves.png")


def test_a_trace_to_its_end(benchmark, tmp_path):
    trace = generate_trace(SHAREGPT, num_conversations=3, seed=0, max_context_tokens=200)
    trace.save(tmp_path / "trace.jsonl")
    flags = {"trace": tmp_path / "trace.jsonl", "window_s": 0, "rates": "1000", "think": "exponential:0"}
    _, document = benchmark(**flags, max_context_tokens=300, max_client_lag_s=1e6)
    results = document["results"]
    assert results["trace"]["digest"] == trace.digest
    assert results["points"][0]["num_requests"] == trace.num_turns


@pytest.mark.long
def test_live_figures(benchmark, conversations, launch, capsys):
    flags = MEMORY | STEPS | conversations | {"progress": "true"}
    benchmark(**CLOSED)  # engines that compute nothing, from here on
    assert launch("benchmark_serving", shared_llm=False, **flags) == 0
    shown = capsys.readouterr().err
    assert "requests/s" in shown and "ms/token" in shown and "histories" in shown


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_turn_that_fails_ends_the_run(benchmark, conversations, monkeypatch, loop):
    """Users in their own thread, who would otherwise wait forever, end as well."""

    def fail(self, handle):
        raise StepFailedError("the device is gone")

    monkeypatch.setattr(load("pensieve_lab.steps.null_runner").NullRunner, "fetch", fail)
    with pytest.raises(StepFailedError, match="device is gone"):
        benchmark(**CLOSED if loop == "closed" else conversations | {"mid_life_s": 0})
    assert not any(thread.name.startswith("users") for thread in threading.enumerate())


@pytest.mark.parametrize("when", ["histories", "serving"])
def test_ctrl_c_ends_the_run_between_steps(benchmark, conversations, monkeypatch, tmp_path, when):
    """The interrupt arrives during a step, which is completed; finished points are in the file."""
    runner, steps = load("pensieve_lab.steps.null_runner").NullRunner, []
    fetch = runner.fetch

    def interrupt(self, handle):
        if not steps:
            signal.raise_signal(signal.SIGINT)
        steps.append(self)
        return fetch(self, handle)

    file = tmp_path / "points.json"
    monkeypatch.setattr(runner, "fetch", interrupt)
    flags = {"mid_life_s": 20 if when == "histories" else 0, "output_json": file, "max_num_running": 1}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        benchmark(**conversations | flags)
    assert signal.getsignal(signal.SIGINT) is before and not file.exists()
    assert 1 <= len(steps) <= 9 and not any(t.name.startswith("users") for t in threading.enumerate())


def test_users_in_the_servers_own_thread_make_no_run_void(benchmark, monkeypatch):
    """In a closed loop their time is part of the measurement, however many are answered at once."""

    class SlowClient(script.InlineClient):
        def take(self):
            found = super().take()
            self.lags += [Lag(sent.arrival_s, 9.0) for sent in found]
            return found

    monkeypatch.setattr(script, "InlineClient", SlowClient)
    _, document = benchmark(**CLOSED)
    (point,) = document["results"]["points"]
    assert point["client_lag_s"]["p99"] == 9.0 and not point["void"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"cpu_pages": 0}, "--cpu_bytes is 0"),
        ({"stateful": "false"}, "--stateful is False"),
        ({"window_s": -1}, "--window_s is -1"),
        ({"drain_s": "inf"}, "--drain_s is inf"),
        ({"max_client_lag_s": 0}, "--max_client_lag_s is 0"),
        ({"output_json": "/nowhere/x.json"}, "--output_json is '/nowhere/x.json'"),
        ({"plot": "/nowhere/x.png"}, "--plot is '/nowhere/x.png'"),
        ({"plot": "x.exe"}, "--plot is 'x.exe'"),
        ({"num_turns": 3}, "--num_turns is 3, but must be left out without --closed_loop"),
        ({"curves": "a.json"}, "--plot is None"),
        ({"curves": "/nowhere/a.json", "plot": "x.png"}, "--curves is '/nowhere/a.json'"),
        ({"curve": "a=/nowhere/a.json", "plot": "x.png"}, "--curve is '/nowhere/a.json'"),
        ({"curve": "a=b.json", "plot": "x.png", "level_ms": 0}, "--level_ms is 0"),
        ({"curves": "a.json", "plot": "x.png", "top_ms": "inf"}, "--top_ms is inf"),
        ({"latency": "first_token"}, "--latency is 'first_token', .* left out without --curves or --curve"),
        ({"level_ms": 18, "plot": "x.png"}, "--level_ms is 18.0, .* left out without --curves or --curve"),
        (
            {"plot": "x.png", "seeds": "0,1"},
            "--plot is 'x.png', but must be left out with several --seeds",
        ),
        (
            {"plot": "x.png", "arrivals": "poisson,a.csv"},
            "--plot is 'x.png', .* or --arrivals, .*compare_serv",
        ),
        ({"rates": "fast"}, "--rates is 'fast'"),
        ({"think": "gamma:3"}, "--think is 'gamma:3'"),
        ({"trace": "/nowhere"}, "--trace is '/nowhere'"),
        (CLOSED | {"rates": "3"}, "--rates is .* beside --closed_loop"),
        (CLOSED | {"max_client_lag_s": 1}, "--max_client_lag_s is 1.0, .* beside --closed_loop"),
        ({"system": "vllm", "gpu_memory_fraction": 0.9}, "--gpu_memory_fraction is 0.9, .* --gpu_pages says"),
        ({"system": "rebatching", "kv_dtype": "int8"}, "--kv_dtype is 'int8', .* stores state in --dtype"),
        ({"system": "vllm", "pack_host": True}, "--pack_host is True, .* packs nothing"),
        (
            {"system": "vllm", "vllm_offload_prompt_only": "true"},
            "--vllm_offload_prompt_only is True, .* left out for --system=vllm",
        ),
        (CLOSED | {"num_turns": 500}, "--num_turns is 500, but must be few enough"),
        (CLOSED | {"output_tokens": 0}, "--output_tokens is 0"),
        ({"system": "vllm"}, "--system is 'vllm', but must be a system that can run here: vllm cannot be"),
        (
            {"loads": "vllm:2"},
            "--loads is 'vllm:2', but must be SYSTEM:RATE .* among pensieve, pensieve-gpu,",
        ),
        ({"loads": "pensieve:2,stateless:fast"}, "--loads is .*, but must be SYSTEM:RATE"),
        ({"loads": "pensieve:0"}, "--loads is .*, but must be SYSTEM:RATE"),
        ({"loads": "stateless:2", "rates": "3"}, "--rates is .*, but must be left out beside --loads"),
        (
            {"loads": "stateless:2", "system": "pensieve"},
            "--system is .*, but must be left out beside --loads",
        ),
        ({"loads": "stateless:2,stateless:3", "profile_steps": 3}, "with several .*--loads"),
        ({"system": "transformers"}, "--system is 'transformers', but must be a system that can run here"),
    ],
)
def test_refuses(launch, monkeypatch, flags, says):
    monkeypatch.setattr(serving_engine, "EngineFactory", lambda _: pytest.fail("loaded"))
    for name in ("vllm", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    with pytest.raises(ConfigError, match=says):
        launch("benchmark_serving", shared_llm=False, **(MEMORY | STEPS | flags))


def test_two_hundred_conversations_unless_told_otherwise(launch, monkeypatch):
    class Stop(Exception):
        pass

    def see(*_):
        raise Stop

    monkeypatch.setattr(script, "open_systems", see)
    with pytest.raises(Stop):
        launch("benchmark_serving", shared_llm=False, closed_loop="true")
    assert script.FLAGS[
        "model"
    ].using_default_value  # whose context is long enough; `launch` put none in its place
    trace, (load_point,) = script.closed_loop()
    assert len(trace.conversations) == 200 and trace.num_turns == 1000
    assert {(t.prompt_tokens, t.output_tokens) for c in trace.conversations for t in c.turns} == {(38, 205)}
    assert all(session.arrival_s == 0 for session in load_point.sessions)
