"""Small versions of every simulated experiment show the paper's orderings, with one seed and with five.

Times are virtual, so nothing here depends on the machine; magnitudes are in `lab/docs/paper_and_we.md`. If an
ordering concerns one load or one memory size, only that is simulated; `fig10b` and `make test-all` simulate
the others too.
"""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from pensieve_jax.config import POLICIES
from pensieve_lab.workload import SHAREGPT, Trace, generate_trace, split_by_session
from tests.launching import load
from tests.seeds import EVERYTHING, enough

SMALL = {"small": "true", "device": "h200", "num_processes": 1, "progress": "false"}
SYSTEMS = ("pensieve", "pensieve-gpu", "stateless")
SEEDS = tuple(range(5)) if EVERYTHING else (1,)  # by seed 0 memory is so short that all policies are alike


@pytest.fixture
def reproduce(launch, capsys, monkeypatch):
    """Run an experiment, or the points that `only` keeps; returns its results."""
    experiments = load("pensieve_lab.experiments.registry").EXPERIMENTS

    def reproduce(experiment, seeds, *, only=None, **flags):
        if only is not None and not EVERYTHING:
            whole = experiments[experiment]
            few = dataclasses.replace(whole, points=lambda settings: only(whole.points(settings)))
            monkeypatch.setitem(experiments, experiment, few)
        flags = SMALL | {"seeds": ",".join(map(str, seeds))} | flags
        if experiment == "oracle":
            del flags["num_processes"]  # it has one
        assert launch("reproduce", shared_llm=False, experiment=experiment, **flags) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]

    return reproduce


def in_the_middle(points):
    """Keep the middle load or memory size of every panel."""
    places = {}
    for point in points:
        places.setdefault(point.panel, set()).add(point.x)
    return [point for point in points if point.x == middle_of(places[point.panel])]


def middle_of(places):
    return sorted(places)[len(places) // 2]


def at_the_highest_load(points):
    highest = max(point.workload.rate_per_s for point in points)
    return [point for point in points if point.workload.rate_per_s == highest]


def by_series(results):
    """Group points by panel, then by series and x."""
    found = {}
    for point in results["points"]:
        found.setdefault(point["panel"], {})[point["series"], point["x"]] = point
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("experiment", "seeds"),
    [
        ("fig10b", (1,)),  # which stands for all
        *(
            pytest.param(name, SEEDS, marks=pytest.mark.long)
            for name in ("fig10a", "fig10b", "fig10c", "fig10d", "fig11", "thesis3.15")
            if EVERYTHING or name != "fig10b"
        ),
    ],
)
def test_state_is_found_in_two_tiers_more_than_in_one_and_in_one_more_than_in_none(
    reproduce, seeds, experiment
):
    results = reproduce(experiment, seeds, only=None if experiment == "fig10b" else in_the_middle)
    assert results["simulated"] and results["seeds"] == list(seeds)
    for points in by_series(results).values():
        rate = middle_of({x for _, x in points})
        both, gpu, none = (points[system, rate] for system in SYSTEMS)
        assert len(both["found_rate_by_seed"]) == len(seeds)
        for key, sign in (("found_rate_by_seed", 1), ("recompute_share_by_seed", -1)):
            for seed in both[key]:
                assert sign * both[key][seed] > sign * gpu[key][seed] > sign * none[key][seed]
        assert set(none["found_rate_by_seed"].values()) == {0.0}
        assert list(none["recompute_share_by_seed"].values()) == pytest.approx([1.0] * len(seeds))
        assert both["normalized_latency_s"]["mean"] < none["normalized_latency_s"]["mean"]


@pytest.mark.long
def test_prompts_beside_decodes_are_no_slower_than_apart(reproduce):
    for points in by_series(reproduce("fig13", SEEDS, only=in_the_middle)).values():
        rate = middle_of({x for _, x in points})
        unified, apart = points["pensieve", rate], points["not unified", rate]
        assert unified["normalized_latency_s"]["mean"] < apart["normalized_latency_s"]["mean"]


@pytest.mark.long
def test_retention_recomputes_least(reproduce):
    """Recomputation counts in seconds of the cost model, relative to a stateless system's for the same
    answers."""
    results = reproduce("fig14", tuple(range(enough(1, 5))), only=in_the_middle)
    (points,) = by_series(results).values()
    size = middle_of({x for _, x in points})  # in the smallest and the largest all are nearly alike
    middle = {series: point["recompute_share"] for (series, x), point in points.items() if x == size}
    assert 0.05 < middle["retention"] < 0.5, "memory is neither plentiful nor hopeless"
    assert middle["retention"] < 0.95 * middle["lru"]
    assert middle["retention"] < 0.9 * middle["conversation"]
    assert middle["retention"] < 0.93 * middle["trailing"]
    share = dict.fromkeys(middle, 0.0)
    for (series, _), point in points.items():
        share[series] += point["recompute_share"]
    assert share["retention"] <= 1.02 * share["lru"]
    assert share["retention"] < 0.95 * share["conversation"]
    assert share["retention"] < 0.98 * share["trailing"]
    assert {one["policy"] for one in results["retention_over"]} == set(POLICIES) - {"retention"}


@pytest.mark.long
def test_longer_think_times_lower_the_hit_rate(reproduce):
    results = reproduce("fig15", SEEDS, only=at_the_highest_load)
    points = by_series(results)[f"{results['shown_rate_per_s']:g} conversations a second"]
    found = [point["found_rate_by_seed"] for (series, _), point in points.items() if series == "pensieve"]
    assert len(found) == 3
    for short, middle, long in zip(*(by_seed.values() for by_seed in found), strict=True):
        assert short > middle > long


def recorded_trace(num_conversations):
    """Make conversations of the synthetic shape, with arrivals and think times as if recorded."""
    rng = random.Random(0)
    made = generate_trace(
        SHAREGPT, num_conversations=num_conversations, seed=0, max_context_tokens=2048
    ).conversations
    return Trace(
        "recorded",
        tuple(
            dataclasses.replace(
                conversation,
                arrival_s=rng.uniform(0, 600),
                turns=(
                    conversation.turns[0],
                    *(
                        dataclasses.replace(turn, think_s=rng.expovariate(1 / 60))
                        for turn in conversation.turns[1:4]  # enough to come back to, in half the time
                    ),
                ),
            )
            for conversation in made
        ),
    )


ORDERS = {"retention", "lru", "conversation", "trailing", "learned", "learned, with experience"}


@pytest.fixture
def recorded(tmp_path):
    """Write a file of 120 conversations; returns it and its trace."""
    path = tmp_path / "chats.jsonl"
    trace = recorded_trace(120)
    trace.save(path)
    return path, trace


def test_the_oracle_recomputes_least(reproduce, recorded):
    path, _ = recorded
    results = reproduce("oracle", [0], traces=f"pensieve:{path}")
    assert {row["title"] for row in results["orders"]} == {"trace", "paper's load"}
    for row in results["orders"]:
        assert 0 <= row["oracle"]["0"] < min(row["lru"]["0"], row["retention"]["0"]) < 1


@pytest.mark.long
def test_recorded_traces_under_every_order_on_sessions_that_are_held_out(reproduce, recorded):
    path, trace = recorded
    results = reproduce("traces", [0], traces=f"pensieve:{path}")
    described, paper = results["traces"]
    _, held_out = split_by_session(trace)
    assert described["file"] == "chats.jsonl" and paper["file"] is None
    assert described["num_sessions"] == 40 < len(held_out.conversations)
    assert str(path.parent) not in json.dumps(results)
    found = by_series(results)
    assert list(found) == ["trace, both tiers", "paper's load, both tiers"]
    for points in found.values():
        assert {series for series, _ in points} == ORDERS
        small, large = sorted({x for _, x in points})
        for order in ORDERS:
            assert points[order, large]["found_rate"] > points[order, small]["found_rate"]
            assert points[order, small]["cpu_hit_rate"] > 0
            assert points[order, small]["first_token_s"]["p99"] > 0
    assert {
        point["num_requests"] for point in results["points"] if point["panel"] == "trace, both tiers"
    } == {described["num_turns"]}
    for one in results["beside_better"]:
        if one["series"] in ("lru", "retention") and one["recompute"]:
            assert one["recompute"]["mean"] >= 1
    assert sum(row["num_returns"] for row in described["returns"]) > 0
    assert {row["rate_x_idle"] for row in paper["returns"]} == {None}

    # The page's tables are made of such a document.
    tables = load("pensieve_lab.pages.trace_tables").made_of(results)
    assert "| trace | memory, tokens | retention | learned |" in tables["traces-recompute"]
    assert f"| {results['points'][0]['recompute_share']:.3f} (" in tables["traces-recompute"]
    assert all("| --- |" in table for table in tables.values())


def test_the_order_that_learns_begins_with_what_other_sessions_taught_it(recorded):
    path, trace = recorded
    settings = load("pensieve_lab.experiments.settings")
    asked = settings.Settings(
        device="h200", seeds=(0,), small=True, traces=(settings.TraceFile(path, "pensieve"),)
    )
    points = load("pensieve_lab.experiments.registry").EXPERIMENTS["traces"].points(asked)
    chosen_on, held_out = split_by_session(trace)
    taught = [point for point in points if point.earlier_workload is not None and point.workload.trace]
    assert taught and {point.series for point in taught} == {"learned, with experience"}
    assert all(point.engine.cache.policy == "learned" for point in taught)
    for point in taught:
        assert ids(point.earlier_workload.conversations(0)) <= ids(chosen_on)
    for point in points:
        if point.workload.trace:
            assert ids(point.workload.conversations(0)) <= ids(held_out)


def test_sessions_of_a_later_time_are_held_out_in_both_senses(recorded):
    """Settings were chosen on one half, so the served sessions are of the other, and later than the
    training."""
    path, trace = recorded
    studies = load("pensieve_lab.experiments.trace_studies")
    study = studies.Study(title="later", between_s=(400.0, 1000.0))
    file = load("pensieve_lab.experiments.settings").TraceFile(path, "pensieve")
    served = study.workload(file, small=False)
    before = study.earlier_workload(served)
    chosen_on, held_out = map(ids, split_by_session(trace))
    starts = {one.conversation_id: one.arrival_s for one in trace.conversations}
    seen, now = ids(before.conversations(0)), ids(served.conversations(0))
    assert now and now <= held_out and all(400.0 <= starts[name] < 1000.0 for name in now)
    assert seen and seen <= chosen_on and all(starts[name] < 400.0 for name in seen)
    for later in (one for one in studies.STUDIES["mooncake"] if one.between_s):
        workload = later.workload(file, small=False)
        assert (
            workload.half == studies.HELD_OUT and later.earlier_workload(workload).half == studies.CHOSEN_ON
        )


def test_what_was_learned_before_is_what_a_run_begins_with(recorded, monkeypatch):
    path, trace = recorded
    settings, module = load("pensieve_lab.experiments.settings"), load("pensieve_lab.experiments.points")
    asked = settings.Settings(
        device="h200", seeds=(0,), small=True, traces=(settings.TraceFile(path, "pensieve"),)
    )
    points = load("pensieve_lab.experiments.registry").EXPERIMENTS["traces"].points(asked)
    point = next(point for point in points if point.earlier_workload is not None)
    seen = []

    def simulate(scenario, sessions, **given):
        seen.append(({session.conversation.conversation_id for session in sessions}, given["learned_state"]))
        outcome = real(scenario, sessions, **given)
        seen[-1] += (outcome.learned_state,)
        return outcome

    real = module.simulate
    monkeypatch.setattr(module, "simulate", simulate)
    module.measure(point)
    (before, began_with, taught), (served, given, _) = seen
    chosen_on, held_out = map(ids, split_by_session(trace))
    assert before <= chosen_on and served <= held_out
    assert began_with is None and given is taught is not None


def ids(trace):
    return {conversation.conversation_id for conversation in trace.conversations}
