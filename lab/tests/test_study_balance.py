"""The study of balance: its loads, figures and ratios, on runs of a second."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from pensieve_jax import ConfigError
from pensieve_lab.simulator.fleet import Change
from tests.launching import load

study = load("study_balance")

from pensieve_lab.balance_study import loads, parts, runs, summary  # noqa: E402

TINY = dataclasses.replace(loads.MADE, mid_life_s=30.0, warm_up_s=1.0, window_s=4.0)


@pytest.fixture(scope="module")
def scene():
    return runs.Scene.of(TINY, {}, loads.COMFORTABLE, 3, 0)


@pytest.mark.parametrize("rule", summary.RULES)
def test_every_rule_serves(scene, rule):
    found = runs.run(scene, parts.CHOSEN[rule]).figures
    assert found["num_turns"] > 20 and found["imbalance"] >= 1
    assert 0 <= found["recomputed_share"] < 1 and 0 <= found["moved_share"] <= 1
    assert found["moved_share"] == 0 or rule not in ("hash", "placed")
    assert found["latency_s"]["p50"] <= found["latency_s"]["p99"]


def test_a_death_is_counted(scene):
    plain = runs.run(scene, parts.CHOSEN["hash"]).figures
    dead = runs.run(scene, parts.CHOSEN["hash"], changes=[Change(2.0, "death", "replica-1")]).figures
    assert dead["num_resent"] > 0 and dead["recomputed_tokens"] > plain["recomputed_tokens"]


def test_hot_roots_have_their_share():
    skewed = dataclasses.replace(TINY, hot_share=0.5, hot_roots=4, mid_life_s=300.0)
    found = skewed.sessions({}, loads.NEAR, 8, 0)
    roots = Counter(session.conversation.root_id for session in found)
    hot = [roots[f"hot-{number}"] for number in range(4)]
    assert hot == sorted(hot, reverse=True) and 0.4 < sum(hot) / len(found) < 0.6


def test_speeds_are_of_the_profile():
    speeds = runs.speeds(TINY, 200.0)
    assert 3e-5 < speeds.token_s < 6e-5 and 6e-3 < speeds.step_s < 10e-3
    assert speeds.capacity_tokens == 40_000_000_000 // (32 * 204_800) * 32


def test_ratios_are_of_the_same_seed():
    rows = [{"seed": seed, "rule": rule, "x": {"p99": value}} for rule, seed, value in
            (("hash", 1, 4.0), ("hash", 0, 2.0), ("other", 0, 1.0), ("other", 1, 8.0))]  # fmt: skip
    other, base = (summary.rows_of(rows, rule=rule) for rule in ("other", "hash"))
    assert summary.ratios(other, base, "x", "p99") == [0.5, 2.0]
    assert summary.geometric_mean([0.5, 2.0]) == pytest.approx(1) and summary.mean_of(base, "x", "p99") == 3


def test_refuses_a_trace_that_was_not_given():
    with pytest.raises(ConfigError, match="--traces"):
        loads.MOONCAKE.sessions({}, loads.NEAR, 8, 0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"seeds": "0,x"}, "--seeds is '0,x', but must be numbers from 0 on"),
        ({"seeds": "-1"}, "--seeds is '-1', but must be numbers from 0 on"),
        ({"out": "/nowhere"}, "--out is '/nowhere', but must be a directory that exists"),
        ({}, "--traces is '', but must be with a file of agent-sessions, burstgpt, mooncake"),
        ({"parts": "tuning"}, "--traces is '', but must be with a file of mooncake"),
    ],
)
def test_refuses_before_anything_runs(launch, monkeypatch, tmp_path, values, says):
    """A bad seed gave a traceback; a missing trace or directory was reported only after hours of other
    loads."""
    monkeypatch.setattr(study, "PARTS", dict.fromkeys(parts.PARTS, lambda settings: pytest.fail("it runs")))
    with pytest.raises(ConfigError, match=says):
        launch("study_balance", shared_llm=False, **{"out": tmp_path, "parts": "loads"} | values)
