"""The simulator's program: figures, tables, the plot, traces, and invalid flags."""

from __future__ import annotations

import json

import pytest

from pensieve_jax import ConfigError
from pensieve_lab.workload import SHAREGPT, WorkloadError, generate_trace
from tests.launching import ROOT, load

# A device small enough that half a minute of a few users fills it.
SMALL = {
    "num_conversations": 200, "gpu_bytes": "700MB", "cpu_bytes": "1GB", "max_context_tokens": 1024,
    "max_num_running": 8, "max_num_batched_tokens": 512, "think": "exponential:5", "rates": "1",
    "mid_life_s": 60, "warm_up_s": 5, "window_s": 15, "progress": "false",
}  # fmt: skip


@pytest.fixture
def simulate(launch, capsys):
    """Run it, with `None` for a flag that is left out; returns what it printed and its document."""

    def simulate(**flags):
        given = {name: value for name, value in (SMALL | flags).items() if value is not None}
        assert launch("simulate", shared_llm=False, **given) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])

    return simulate


@pytest.mark.long
def test_systems_rates_and_the_plot(simulate, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "curves.png"
    out, document = simulate(rates="0.3,0.6", plot=plot)
    assert {"versions", "hardware", "command", "units"} <= document.keys()
    results = document["results"]
    assert results["profile"]["source"] == "measured" and len(results["trace"]["digest"]) == 64
    found = results["systems"]
    assert list(found) == ["pensieve", "pensieve-gpu", "stateless"]
    assert [one["rate"] for one in found["pensieve"]] == [0.3, 0.6]
    busy = {name: runs[1] for name, runs in found.items()}
    recomputed = [one["recomputed_tokens"] / one["history_tokens"] for one in busy.values()]
    assert recomputed[0] < recomputed[1] < recomputed[2] == 1
    assert busy["pensieve"]["swapped_in_bytes"] > 0 == busy["pensieve-gpu"]["swapped_in_bytes"]
    for runs in found.values():
        for one in runs:
            assert one["num_requests"] > 5 and one["normalized_latency_s"]["p99"] > 0
            assert one["simulated_requests"] >= one["num_requests"]
            assert 0 < one["padding_share_of_step_time"] < 0.5
    assert "ms/token p99" in out and "GB out" in out and "padding" in out and "NVIDIA H200" in out
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.parametrize("unified", ["true", "false"])
def test_policies_replicas_and_stepping_give_the_same_again(simulate, unified):
    flags = {"policies": "retention,trailing", "replicas": 2, "routing": "random", "systems": "pensieve"}
    flags["unified"] = unified
    documents = [simulate(stretches=stretches, **flags)[1] for stretches in ("true", "false")]
    first, second = (document["results"]["systems"] for document in documents)
    assert list(first) == ["pensieve, retention", "pensieve, trailing"]
    for name in first:
        for one, again in zip(first[name], second[name], strict=True):
            same = one.keys() - {"simulation_cpu_s", "simulation_wall_s"}
            assert {key: one[key] for key in same} == {key: again[key] for key in same}


def test_decodes_that_pause_for_prompts_make_answers_slower(simulate):
    """The median is compared: a request that passed others and was suspended for them is far slower."""
    median_s = []
    for unified in ("true", "false"):
        _, document = simulate(unified=unified, systems="stateless")
        median_s.append(document["results"]["systems"]["stateless"][0]["output_token_s"]["p50"])
    assert median_s[0] < median_s[1]


def test_a_trace_with_recorded_times_to_its_end(simulate, tmp_path):
    path = tmp_path / "trace.jsonl"
    turn = {"gap_s": None, "new_tokens": 9, "output_tokens": 5}
    lines = [{"session": f"s{i}", "start_s": 3.0 * i, "turns": [turn]} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = {"trace": path, "trace_format": "burstgpt", "recorded_arrivals": "true", "think": "recorded"}
    _, document = simulate(**flags, rates=None, window_s=0, systems="pensieve")
    (one,) = document["results"]["systems"]["pensieve"]
    assert one["rate"] is None and one["num_requests"] == 4 and 9 < one["seconds"] < 10
    assert one["num_unfinished"] == 0


def test_a_saved_trace_is_the_one_it_was_made_from(simulate, tmp_path):
    trace = generate_trace(SHAREGPT, num_conversations=200, seed=0, max_context_tokens=1024)
    trace.save(tmp_path / "trace.jsonl")
    made, saved = (
        simulate(**flags, systems="stateless")[1]["results"]
        for flags in ({}, {"trace": tmp_path / "trace.jsonl"})
    )
    assert made["trace"]["digest"] == saved["trace"]["digest"] == trace.digest
    names = ("num_requests", "normalized_latency_s", "recomputed_tokens")
    first, second = ([one["systems"]["stateless"][0][name] for name in names] for one in (made, saved))
    assert first == second


def test_costs_that_the_policy_goes_by(launch, monkeypatch):
    """An engine on an H200 uses the shipped profile; the simulator uses the estimate by default."""
    script, ratios = load("simulate"), {}
    monkeypatch.setattr(
        script, "measure_all", lambda profile, trace: ratios.update(found=ratio(profile)) or ()
    )
    monkeypatch.setattr(script, "report", lambda *_: None)

    def ratio(profile):
        costs = script.cost_model(profile)
        return round(costs.chunk_cost_s(4096) / costs.chunk_cost_s(32), 2)

    def found(**flags):
        launch("simulate", shared_llm=False, **SMALL | flags)
        return ratios.pop("found")

    assert found() == found(cost_profile="analytic") == 1.15
    assert found(cost_profile="shipped") == 1.30
    assert found(cost_profile=ROOT / "pensieve_jax/cost_profiles/h200_llama2-13b-gqa10.json") == 1.30


@pytest.mark.long
def test_shows_live_figures(launch, capsys):
    assert launch("simulate", shared_llm=False, **SMALL | {"progress": "true", "window_s": 90}) == 0
    shown = capsys.readouterr().err
    assert "requests/s" in shown and "cache hit rate" in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"systems": "pensieve,vllm"}, "--systems is 'pensieve,vllm'"),
        ({"policies": "fifo"}, "--policies is 'fifo'"),
        ({"rates": "fast"}, "--rates is 'fast'"),
        ({"recorded_arrivals": "true"}, "--rates is '1'"),
        ({"think": "gamma:3"}, "--think is 'gamma:3'"),
        ({"think": "lognormal:3"}, "--think is 'lognormal:3'"),
        ({"gpu_bytes": "much"}, "--gpu_bytes is 'much'"),
        ({"gpu_bytes": "40MB"}, "--gpu_bytes is '40MB', but must be at least 209,715,200 bytes"),
        ({"trace": "/nowhere", "trace_format": "sharegpt"}, "--tokenizer is None"),
        ({"plot": "/nowhere/curves.png"}, "a directory that exists"),
        ({"cpu_bytes": "1MB"}, "cache.cpu_bytes is 1000000"),
        ({"cpu_bytes": "0GB"}, "--cpu_bytes is 0"),
        ({"window_s": -1}, "--window_s is -1"),
        ({"profile": "tpu"}, "device_profile is 'tpu'"),
        ({"trace": "/nowhere"}, "--trace is '/nowhere'"),
        ({"trace": "/nowhere", "workload": "sharegpt"}, "--workload is 'sharegpt'"),
        ({"replicas": 0}, "num_replicas is 0"),
        ({"plot": "curves.exe"}, "--plot is 'curves.exe'"),
        ({"cost_profile": "/nowhere"}, "cost_profile is '/nowhere'"),
        (
            {"cost_profile": "shipped", "chunk_tokens": 16},
            "--cost_profile is 'shipped', but must be 'analytic'",
        ),
        (
            {"cost_profile": "shipped", "kv_dtype": "int8"},
            "--cost_profile is 'shipped', but must be 'analytic'",
        ),
        (
            {"cost_profile": "shipped", "profile": "h200_opt-13b", "gpu_bytes": "4GB"},
            "--cost_profile is 'shipped', but must be",
        ),
        (
            {"cost_profile": "shipped", "profile": "h200x2_llama2-70b", "gpu_bytes": "4GB"},
            "--cost_profile is 'shipped', but",
        ),
        ({"cost_profile": "shipped", "profile": "a100_llama2-13b-gqa10"}, "--cost_profile is 'shipped', but"),
        ({"kv_read_rate": 0.5}, "--kv_read_rate is 0.5, but must be left out without --kv_dtype"),
        ({"kv_read_rate": 0, "kv_dtype": "int8"}, "--kv_read_rate is 0.0, but must be above 0"),
    ],
)
def test_refuses(launch, flags, says):
    with pytest.raises(ConfigError, match=says):
        launch("simulate", shared_llm=False, **SMALL | flags)


def test_refuses_rates_that_are_none(launch):
    with pytest.raises(WorkloadError, match="rate_per_s"):
        launch("simulate", shared_llm=False, **SMALL | {"rates": "0"})


def test_a_recording_that_ends_before_the_run_begins_is_refused(launch, tmp_path):
    """The run begins in mid-life, half an hour on by default; a short trace gave a table of zeros."""
    path = tmp_path / "short.csv"
    path.write_text("prompt_tokens,output_tokens,time_s\n9,1,0\n9,1,60\n")
    values = {"trace": path, "recorded_arrivals": "true", "progress": "false"}
    with pytest.raises(ConfigError, match=r"--mid_life_s is 1800.0, but must be less than short.csv lasts"):
        launch("simulate", shared_llm=False, **values)


def test_a_recording_may_begin_at_any_time(simulate, tmp_path):
    """The end of a long recording had no sessions in its first minutes, and was refused as too short."""
    path = tmp_path / "late.jsonl"
    turns = ({"input_length": 600, "output_length": 20, "hash_ids": [i, i + 1000]} for i in range(30))
    lines = [json.dumps(turn | {"timestamp": 10**8 + 5000 * i}) for i, turn in enumerate(turns)]
    path.write_text("\n".join(lines))
    flags = {"trace": path, "recorded_arrivals": "true", "rates": None, "systems": "stateless"}
    for mid_life_s, num_requests in ((0, 12), (90, 12)):
        _, document = simulate(mid_life_s=mid_life_s, warm_up_s=0, window_s=60, **flags)
        assert document["results"]["systems"]["stateless"][0]["num_requests"] == num_requests
