"""The simulator compared with measured load points: the same trace and users, and the criteria."""

from __future__ import annotations

import json

import pytest

from lab.tests.serving_fakes import NullFactory
from pensieve_jax import ConfigError
from pensieve_lab.simulator import DeviceProfile, profile_names
from pensieve_lab.simulator import profile as profile_module
from tests.launching import load

script = load("validate_simulator")
validation = load("pensieve_lab.serving.validation_criteria")

BENCHMARK = {
    "model": "random:llama-tiny", "dtype": "float32", "token_buckets": "16,64", "max_num_running": 8,
    "gpu_pages": 48, "cpu_pages": 24, "chunk_tokens": 16, "max_num_staged_pages": 4, "progress": "false",
    "max_context_tokens": 300, "rates": "4", "think": "exponential:0.5", "num_conversations": 300,
    "mid_life_s": 20, "warm_up_s": 0.2, "window_s": 1, "drain_s": 1, "max_client_lag_s": 1e6,
}  # fmt: skip
TRACE = {"num_conversations": 300, "progress": "false"}
STEP = {"16": {"num_steps": 90, "mean_s": 0.01, "mean_tokens": 9.0}, "64": {"num_steps": 1, "mean_s": 0.001,
        "mean_tokens": 40.0}}  # fmt: skip


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    """Make a profile of the tiny model, on a device that takes ten milliseconds per step."""
    directory = profile_module._DIRECTORY
    values = json.loads((directory / f"{profile_names()[-1]}.json").read_text())
    values |= {"model": "llama-tiny", "kv_token_bytes": 2 * 2 * 2 * 32 * 4, "figures": []}
    path = tmp_path_factory.mktemp("profile") / "tiny.json"
    path.write_text(json.dumps(values))
    assert DeviceProfile.load(path).model == "llama-tiny"
    return str(path)


@pytest.fixture(scope="module")
def documents():
    """Cache of measured documents by flags: most tests share a load point, which takes a second or two."""
    return {}


@pytest.fixture
def measured(launch, capsys, monkeypatch, tmp_path, documents):
    """Measure on engines that compute nothing, or reuse such a document; returns a file for the test."""

    def measured(**flags):
        monkeypatch.setattr(load("pensieve_lab.serving.engine_server"), "EngineFactory", NullFactory)
        path = tmp_path / "measured.json"
        path.unlink(missing_ok=True)
        key = repr(sorted(flags.items()))
        if key not in documents:
            given = BENCHMARK | {"output_json": path} | flags
            assert launch("benchmark_serving", shared_llm=False, **given) == 0
            capsys.readouterr()
            documents[key] = path.read_bytes()
        path.write_bytes(documents[key])
        return path

    return measured


@pytest.fixture
def validate(launch, capsys, profile):
    """Run it; returns its status, what it printed, and its document's results."""

    def validate(path, **flags):
        given = TRACE | {"documents": path, "profile": profile} | flags
        status = launch("validate_simulator", shared_llm=False, **given)
        out = capsys.readouterr().out
        return status, out, json.loads(out.splitlines()[-1])["results"]

    return validate


def changed(path, **figures):
    """Write a document whose load point has other figures."""
    document = json.loads(path.read_text())
    (point,) = document["results"]["points"]
    point |= figures
    path.write_text(json.dumps(document) + "\n")


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [{}, {"system": "stateless", "unified": "false"}, {"window_s": 0, "num_conversations": 3}]
)
def test_what_was_simulated_passes_as_measured(measured, validate, flags):
    """On a device that matches the profile every criterion passes; one changed figure misses."""
    path = measured(**flags)
    trace_flags = {name: flags[name] for name in flags.keys() & TRACE.keys()}
    status, out, results = validate(path, **trace_flags)
    (point,) = results["points"]
    simulated = point["simulated"]
    assert (status != 0) == (results["num_missed"] > 0) and "ms/token mean" in out
    trace = json.loads(path.read_text())["results"]["trace"]
    assert point["simulated"]["trace"] == trace["digest"] and simulated["output_tokens"] > 0
    changed(path, **simulated, sent_requests_per_s=simulated["requests_per_s"])
    status, out, results = validate(path, **trace_flags)
    assert status == 0 == results["num_missed"] and "every criterion passed" in out
    latency_s = simulated["normalized_latency_s"]
    changed(path, normalized_latency_s={**latency_s, "mean": 2 * latency_s["mean"]})
    status, out, results = validate(path, **trace_flags)
    assert status == 1 == results["num_missed"] and "MISS" in out and "1 criteria missed" in out
    (found,) = results["points"][0]["criteria"][1:2]
    assert (found["figure"], found["verdict"]) == ("ms/token mean", "MISS")
    assert found["difference"] == pytest.approx(-0.5)


def point(**figures):
    spread = {"mean": 0.02, "p50": 0.02, "p90": 0.02, "p99": 0.02}
    return {
        "requests_per_s": 2.0, "sent_requests_per_s": 2.0, "normalized_latency_s": spread,
        "first_token_s": spread, "output_token_s": None, "gpu_hit_rate": 0.5, "cpu_hit_rate": 0.2,
        "recomputed_tokens": 7, "num_suspensions": 0, "num_steps": 91, "tokens_per_step": 9.3,
        "swapped_out_bytes": 10**9, "swapped_in_bytes": 0, "steps": STEP,
    } | figures  # fmt: skip


def verdicts(measured, simulated):
    return {one.figure: one.verdict for one in validation.criteria(measured, simulated)}


def test_throughput_counts_over_the_knee_and_latency_elsewhere():
    slow = {"normalized_latency_s": {"mean": 0.03}, "requests_per_s": 1.5}
    under = verdicts(point(), point(**slow))
    assert (under["requests/s"], under["ms/token mean"]) == ("-", "MISS")
    over = verdicts(point(sent_requests_per_s=3.0), point(**slow))
    assert (over["requests/s"], over["ms/token mean"]) == ("MISS", "-")
    assert validation.is_over_the_knee(point(sent_requests_per_s=3.0))
    assert not validation.is_over_the_knee(point(sent_requests_per_s=0.0))


def test_hit_rates_are_compared_by_points():
    found = verdicts(point(cpu_hit_rate=0.01), point(gpu_hit_rate=0.54, cpu_hit_rate=0.03))
    assert (found["gpu hits"], found["cpu hits"]) == ("MISS", "pass")


def test_buckets_that_took_next_to_no_time_decide_nothing():
    steps = {"16": {**STEP["16"], "mean_s": 0.0111}, "64": {**STEP["64"], "mean_s": 1.0}}
    found = verdicts(point(), point(steps=steps))
    assert (found["ms/step of 16"], found["ms/step of 64"]) == ("MISS", "-")
    assert verdicts(point(), point(steps={}))["ms/step of 16"] == "MISS", "the simulator had no such step"
    assert verdicts(point(), point())["ms/step of 16"] == "pass"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"documents": ""}, "--documents is ''"),
        ({"documents": "/nowhere.json"}, "--documents is '/nowhere.json'"),
        ({"rates": "3"}, "--rates is .* left out: --documents determine it"),
        ({"seed": 3}, "--seed is 3, but must be left out"),
        (
            {"profile": "h200_opt-13b"},
            "--profile is 'h200_opt-13b', but must be a device's profile of 'llama-tiny'",
        ),
        ({"num_conversations": 299}, "--trace is .* the trace of .*measured.json, line 1"),
    ],
)
def test_refuses(measured, validate, flags, says):
    path = measured()
    with pytest.raises(ConfigError, match=says):
        validate(path, **flags)


def test_refuses_what_cannot_be_simulated(measured, validate, tmp_path):
    path = measured()
    changed(path, void=True)
    with pytest.raises(ConfigError, match="not void"):
        validate(path)
    text = path.read_text()
    for old, new, says in (
        ('"open loop"', '"closed loop"', "open loops, of this project's own systems"),
        ('"gpu_pages"', '"gpu_sheets"', "that this version of benchmark_serving wrote"),
        ('"points"', '"dots"', "files that --output_json wrote"),
    ):
        path.write_text(text.replace(old, new).replace('"void": true', '"void": false'))
        with pytest.raises(ConfigError, match=says):
            validate(path)
