"""Programs that end with a JSON document, at small sizes."""

from __future__ import annotations

import json
import sys

import pytest

from pensieve_jax import ConfigError
from pensieve_jax.config import POLICIES
from tests.launching import ROOT, load

SIZES = {"num_conversations": 6, "num_turns": 3, "prompt_tokens": 12, "output_tokens": 24}
ENGINE = {"token_buckets": 64, "max_num_running": 8, "chunk_tokens": 16}


def last_line(out):
    return json.loads(out.splitlines()[-1])


@pytest.mark.long
def test_check_serving(launch, compilation_cache, capsys):
    flags = SIZES | ENGINE | {"compilation_cache_dir": compilation_cache}
    assert launch("check_serving", shared_llm=False, **flags) == 0
    document = last_line(capsys.readouterr().out)
    results = document["results"]
    assert all(results["checks"].values())
    assert results["logprobs"]["num_logprobs"] == 6 * 3 * 24
    assert results["logprobs"]["max_abs_difference"] < 1e-3
    assert results["logprobs"]["same_choice_fraction"] > 0.99
    assert results["num_dropped_chunks"] > 0
    assert {"versions", "hardware", "command", "environment", "units"} <= document.keys()


def test_a_report_names_the_variables_that_matter(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    line = load("pensieve_jax.commands.report").json_line("name", {}, units={}, device="none")
    environment = json.loads(line)["environment"]
    assert environment["XLA_FLAGS"] == "--xla_gpu_autotune_level=0"
    assert "SOMETHING_ELSE" not in environment and "secret" not in line


@pytest.mark.long
def test_check_serving_finds_a_difference(launch, llm, monkeypatch, capsys):
    """Replies of one model are compared with the logprobs of another, whose weights have another seed."""
    script = load("check_serving")
    flags = SIZES | ENGINE | {"random_seed": 1}
    assert launch("check_serving", **flags) == 1
    results = last_line(capsys.readouterr().out)["results"]
    assert results["logprobs"]["p99_abs_difference"] > script.FLAGS.tolerance


def test_check_serving_refuses_more_than_the_context_before_loading(launch, monkeypatch):
    monkeypatch.setattr(load("check_serving"), "open_llm", lambda **_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="--num_turns is 500"):
        launch("check_serving", shared_llm=False, **(SIZES | ENGINE | {"num_turns": 500}))


@pytest.mark.long
def test_benchmark_scheduler(launch, monkeypatch, capsys):
    """One round runs in its own process, as all do in practice; the others decide the same in this one."""
    script, children = load("benchmark_scheduler"), []
    real, sizes = script.one_round, {"num_running": 8, "context_tokens": 600, "num_idle": 64, "num_steps": 16}

    def one_round(name, tree):
        if not children:
            children.append(real(name, tree))
            return children[0]
        return script.measure(script.LOADS[name](), script.FLAGS.num_steps)

    monkeypatch.setattr(script, "one_round", one_round)
    monkeypatch.delattr(script.os, "sched_setaffinity", raising=False)  # it would take one core for itself
    monkeypatch.setattr(sys, "argv", ["benchmark_scheduler", *(f"--{k}={v}" for k, v in sizes.items())])
    assert launch("benchmark_scheduler", shared_llm=False, num_rounds=1, versus=ROOT, **sizes) == 0
    out = capsys.readouterr().out
    results = last_line(out)["results"]
    assert len(children[0]) == sizes["num_steps"]
    assert results["decode"]["num_rows"] == 8
    assert results["mixed"]["num_drops"] > 0 and results["mixed, two tiers"]["num_copies"] > 0
    for name, faster in results["times_faster"].items():
        before, now = results["before"][name], results[name]
        assert before["num_tokens"] == now["num_tokens"], "not the same steps"
        assert faster == pytest.approx(before["mean_ms"] / now["mean_ms"])
    assert "decide differently" not in out
    loads = [name for name in script.LOADS if results[name]["mean_ms"] > results["target_ms"]]
    outcome = f"missed by {' and '.join(loads)}" if loads else "met"
    assert f"on average: {outcome}\n" in out and results["target_met"] == (not loads)


@pytest.mark.long
def test_benchmark_eviction(launch, capsys):
    """Every order is measured, and the learned one as each of its three."""
    launch("benchmark_eviction", shared_llm=False, num_idle=40, max_chunks=6, num_turns=40)
    results = last_line(capsys.readouterr().out)["results"]
    orders = results["orders"]
    assert len(orders) == len(POLICIES) + 2 and all(costs["num_decisions"] > 0 for costs in orders.values())
    assert orders["lru"]["turn_us"] is None and orders["learned, following returns"]["turn_us"] > 0
    assert orders["lru"]["num_decisions"] == orders["learned, following lru"]["num_decisions"]
