"""Small versions of every simulated experiment: the orderings that the paper is about, by one seed and five.

Times are virtual, so nothing here depends on the machine; magnitudes are in `docs/paper_and_we.md`.
"""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from pensieve_jax.workload import SHAREGPT, Trace, generate_trace

SMALL = {"small": "true", "device": "h200", "num_processes": 1, "progress": "false"}
SYSTEMS = ("pensieve", "pensieve-gpu", "stateless")


@pytest.fixture(params=[(1,), pytest.param((0, 1, 2, 3, 4), marks=pytest.mark.long)], ids=["seed", "seeds"])
def seeds(request):
    """One stands for five."""
    return request.param


@pytest.fixture
def reproduce(launch, capsys):
    """Run an experiment; gives its results."""

    def reproduce(experiment, seeds, **flags):
        flags = SMALL | {"seeds": ",".join(map(str, seeds))} | flags
        assert launch("reproduce", shared_llm=False, experiment=experiment, **flags) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]

    return reproduce


def by_series(results):
    """Points by panel, then by series and x."""
    found = {}
    for point in results["points"]:
        found.setdefault(point["panel"], {})[point["series"], point["x"]] = point
    return found


@pytest.mark.parametrize(
    "experiment", ["fig10a", "fig10b", "fig10c", "fig10d", "fig11", "thesis3.15"], ids=lambda name: name
)
def test_state_is_found_in_two_tiers_more_than_in_one_and_in_one_more_than_in_none(
    reproduce, seeds, experiment
):
    results = reproduce(experiment, seeds)
    assert results["simulated"] and results["seeds"] == list(seeds)
    for points in by_series(results).values():
        rate = sorted({x for _, x in points})[1]
        both, gpu, none = (points[system, rate] for system in SYSTEMS)
        assert len(both["found_rate_by_seed"]) == len(seeds)
        for key, sign in (("found_rate_by_seed", 1), ("recompute_share_by_seed", -1)):
            for seed in both[key]:
                assert sign * both[key][seed] > sign * gpu[key][seed] > sign * none[key][seed]
        assert set(none["found_rate_by_seed"].values()) == {0.0}
        assert list(none["recompute_share_by_seed"].values()) == pytest.approx([1.0] * len(seeds))
        assert both["normalized_latency_s"]["mean"] < none["normalized_latency_s"]["mean"]


def test_prompts_beside_decodes_are_no_slower_than_apart(reproduce, seeds):
    for points in by_series(reproduce("fig13", seeds)).values():
        rate = sorted({x for _, x in points})[1]
        unified, apart = points["pensieve", rate], points["not unified", rate]
        assert unified["normalized_latency_s"]["mean"] < apart["normalized_latency_s"]["mean"]


def test_retention_recomputes_least(reproduce, seeds):
    """In seconds by the cost model, over what a stateless system recomputes for the same answers."""
    results = reproduce("fig14", seeds)
    (points,) = by_series(results).values()
    share = dict.fromkeys((series for series, _ in points), 0.0)
    for (series, _), point in points.items():
        share[series] += point["recompute_share"] / 3  # over the sizes of memory
    assert 0.05 < share["retention"] < 0.5, "memory is neither plentiful nor hopeless"
    assert share["retention"] <= 1.02 * share["lru"]
    assert share["retention"] < 0.95 * share["conversation"]
    assert share["retention"] < 0.98 * share["trailing"]
    assert {one["policy"] for one in results["retention_over"]} == {"lru", "conversation", "trailing"}


def test_who_thinks_for_longer_finds_less(reproduce, seeds):
    results = reproduce("fig15", seeds)
    points = by_series(results)[f"{results['shown_rate_per_s']:g} conversations a second"]
    found = [point["found_rate_by_seed"] for (series, _), point in points.items() if series == "pensieve"]
    assert len(found) == 3
    for short, middle, long in zip(*(by_seed.values() for by_seed in found), strict=True):
        assert short > middle > long


def recorded_trace(num_conversations):
    """Conversations of the synthetic shape, with arrivals and think times as if they had been recorded."""
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
                        for turn in conversation.turns[1:]
                    ),
                ),
            )
            for conversation in made
        ),
    )


def test_recorded_traces_under_every_order_and_with_both_tiers(reproduce, tmp_path):
    path = tmp_path / "chats.jsonl"
    trace = recorded_trace(60)
    trace.save(path)
    results = reproduce("traces", [0], traces=f"pensieve:{path}")
    (described,) = results["traces"]
    assert described["file"] == "chats.jsonl" and described["digest"] == trace.digest
    assert str(tmp_path) not in json.dumps(results)
    found = by_series(results)
    both, alone = found["chats.jsonl, both tiers"], found["chats.jsonl, device alone"]
    policies = {"retention", "lru", "conversation", "trailing"}
    assert {series for series, _ in both} == policies == {series for series, _ in alone}
    small, large = sorted({x for _, x in both})
    for policy in policies:
        assert both[policy, large]["found_rate"] > both[policy, small]["found_rate"]
        assert (
            both[policy, small]["cpu_hit_rate"] > 0 == alone[policy, min(x for _, x in alone)]["cpu_hit_rate"]
        )
        assert both[policy, large]["num_requests"] == trace.num_turns
