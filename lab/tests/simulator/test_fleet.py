"""Fleets: every turn is answered once despite deaths and changes; the simplified replica matches the real
one."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lab.tests.simulator.test_simulation import scenario, session
from lab.tests.simulator.workloads import COSTS, MAX_CONTEXT_TOKENS, PROFILE, make_sessions, small_config
from pensieve_jax import CacheConfig, ConfigError
from pensieve_jax.balance import ConsistentHash, Load, RootPlacement, Speeds
from pensieve_lab.balance.migrating import MigratingHash
from pensieve_lab.balance.state_aware import StateAware
from pensieve_lab.simulator import Replica, figures, simulate
from pensieve_lab.simulator.fleet import Change, Fleet, Fronts
from pensieve_lab.simulator.fluid_replica import FluidReplica
from pensieve_lab.workload import Client
from tests.seeds import new_seed

SPEEDS = Speeds(token_s=4e-5, step_s=8e-3, context_token_s=5e-8, output_tokens=30.0, capacity_tokens=640)
RULES = {
    "hash": ConsistentHash,
    "state-aware": lambda: StateAware(SPEEDS),
    "named": lambda: RootPlacement(SPEEDS),
    "migrating": lambda: MigratingHash(every_s=0.3, smooth_s=0.5),
}
NAMES = [f"r{number}" for number in range(4)]


def real(number, start_s):
    return Replica(small_config(), PROFILE, COSTS, number=number, start_s=start_s)


def outline(number, start_s):
    return FluidReplica(small_config(), PROFILE, number=number, start_s=start_s)


def turns_of(sessions):
    return {(s.conversation.conversation_id, k) for s in sessions for k in range(len(s.conversation.turns))}


def answered(fleet, sessions, until_s=1e9):
    client = Client(sessions, MAX_CONTEXT_TOKENS)
    answers = list(fleet.serve(client, until_s))
    keys = [(a.turn.conversation_id, a.turn.turn_index) for a in answers]
    assert len(keys) == len(set(keys)), "answered twice"
    assert all(a.turn.arrival_s < a.first_token_s <= a.end_s for a in answers)
    return answers, client


@pytest.mark.parametrize("make", [real, outline])
@pytest.mark.parametrize("rule", RULES)
def test_every_turn_is_answered_once_whatever_happens(make, rule):
    rng = random.Random(new_seed())
    sessions = make_sessions(rng.randrange(2**20), num_sessions=40, gap_s=0.1)
    kinds = [
        Change(rng.uniform(0.5, 3), "death", "r1"),
        Change(rng.uniform(3.2, 4), "join", rng.choice(("r1", "r9"))),
        Change(rng.uniform(0.5, 4), "leave", "r2"),
        Change(rng.uniform(0.5, 4), "join", "r5"),
    ]
    fronts = Fronts(count=3, sticky=rng.random() < 0.5, staleness_s=0.1, detection_s=0.2)
    fleet = Fleet(make, RULES[rule], NAMES, fronts=fronts, changes=kinds, seed=rng.randrange(99))
    answers, client = answered(fleet, sessions)
    refused = Client(sessions, MAX_CONTEXT_TOKENS)  # of the same sessions, on one server that never dies
    alone = Fleet(outline, ConsistentHash, ["r0"])
    assert len(answers) == len(list(alone.serve(refused, 1e9)))
    assert client.num_refused == refused.num_refused
    assert {(a.turn.conversation_id, a.turn.turn_index) for a in answers} <= turns_of(sessions)
    assert set(fleet.loads().values()) == {Load()}, "nothing is left to do"


@pytest.mark.parametrize("make", [real, outline])
def test_a_death_loses_state_and_sends_again(make):
    one = [session("a", (20, 40), (20, 400), (10, 10), think_s=0.5)]
    plain, _ = answered(Fleet(make, ConsistentHash, NAMES), one)
    second = plain[1]
    at_s = (second.first_token_s + second.end_s) / 2
    victim = NAMES[second.replica]
    fleet = Fleet(
        make, ConsistentHash, NAMES, changes=[Change(at_s, "death", victim)], fronts=Fronts(detection_s=2.0)
    )
    answers, _ = answered(fleet, one)
    lost = answers[1]
    assert fleet.num_resent == 1 and lost.turn.arrival_s == second.turn.arrival_s
    assert fleet.name_of(lost.replica) != victim
    assert lost.usage.recomputed_tokens == 59 and second.usage.recomputed_tokens == 0
    assert lost.first_token_s > at_s + 2.0


def test_turns_sent_before_a_death_is_seen_are_sent_again():
    (name,) = {
        NAMES[a.replica] for a in answered(Fleet(outline, ConsistentHash, NAMES), [session("a", (9, 9))])[0]
    }
    late = [session("a", (9, 9), arrival_s=1.5)]
    fleet = Fleet(outline, ConsistentHash, NAMES, changes=[Change(1.0, "death", name)])
    (answer,), _ = answered(fleet, late)
    assert fleet.num_resent == 1 and answer.turn.arrival_s == 1.5 and answer.first_token_s > 2.0


@pytest.mark.parametrize("then", ["join", "leave", "death"])
def test_a_replica_that_died_may_change_before_its_death_is_seen(then):
    """It restarts under its name, leaves, or dies at its start; all its turns are sent again, once."""
    sessions = make_sessions(5, num_sessions=40, gap_s=0.1)
    changes = [Change(1.0, "death", "r1"), Change(1.5, then, "r1")]
    fronts = Fronts(detection_s=1.0)
    fleet = Fleet(outline, ConsistentHash, NAMES, changes=changes, fronts=fronts)
    answers, client = answered(fleet, sessions)
    assert fleet.num_resent
    alone, refused = answered(Fleet(outline, ConsistentHash, NAMES), sessions)
    assert len(answers) == len(alone) and client.num_refused == refused.num_refused
    assert ("r1" in fleet.loads()) == (then == "join")
    served = {fleet.name_of(one.replica) for one in answers if one.end_s > 2.0}
    assert ("r1" in served) == (then == "join")


def test_a_leaving_replica_answers_its_turns_and_gets_no_new_ones():
    one = [session("a", (20, 200), (10, 10), think_s=0.5)]
    first = answered(Fleet(outline, ConsistentHash, NAMES), one)[0][0]
    name = NAMES[first.replica]
    at_s = (first.first_token_s + first.end_s) / 2
    answers, _ = answered(Fleet(outline, ConsistentHash, NAMES, changes=[Change(at_s, "leave", name)]), one)
    assert answers[0].end_s == first.end_s and answers[1].replica != first.replica
    assert answers[1].usage.recomputed_tokens == 219


def test_old_loads_are_old_but_for_what_a_front_sends_itself():
    class Spy(ConsistentHash):
        seen = []  # noqa: RUF012

        def choose(self, asked, loads, now_s):
            Spy.seen.append((now_s, sum(load.num_turns for load in loads.values())))
            return super().choose(asked, loads, now_s)

    sessions = [session(f"c{n}", (10, 400), arrival_s=0.1 * n) for n in range(12)]
    answered(Fleet(outline, Spy, NAMES, fronts=Fronts(count=1, staleness_s=0.35)), sessions)
    assert [count for _, count in Spy.seen] == list(range(12)), "one front knows what it has sent"
    Spy.seen.clear()
    answered(Fleet(outline, Spy, NAMES, fronts=Fronts(count=2, sticky=False, staleness_s=0.35)), sessions)
    assert sum(count for _, count in Spy.seen) < sum(range(12)), "two do not"


def test_mid_life_state_is_where_the_rule_would_have_it():
    one = [session("a", (30, 40), (10, 10), arrival_s=1.0, first_turn=1)]
    for make in (real, outline):
        fleet = Fleet(make, ConsistentHash, NAMES, start_s=-5.0)
        fleet.place(one)
        (answer,), _ = answered(fleet, one)
        assert answer.usage.recomputed_tokens == 0 and fleet.num_moved == 0


def test_an_outline_refuses_windows():
    step = dataclasses.replace(PROFILE.step, windows=((1024, 1.0),))
    unsized = dataclasses.replace(small_config(), cache=CacheConfig())  # the windows are refused before it
    with pytest.raises(ConfigError, match=r"a profile without windows.*with `Replica` instead"):
        FluidReplica(unsized, dataclasses.replace(PROFILE, step=step))


def test_an_outline_is_near_the_real_one():
    """A single turn agrees to some milliseconds, a few to a tenth; a crowd, with copies, to two fifths."""
    (lonely,) = simulate(scenario(), [session("a", (20, 50))]).answers
    (drawn,), _ = answered(Fleet(outline, ConsistentHash, ["r0"]), [session("a", (20, 50))])
    assert drawn.usage == lonely.usage
    assert drawn.end_s == pytest.approx(lonely.end_s, rel=0.1)
    for gap_s, off in ((0.5, 0.1), (0.15, 0.4)):
        sessions = make_sessions(3, num_sessions=60, gap_s=gap_s)
        whole = figures(simulate(scenario(), sessions), 1)["normalized_latency_s"]["mean"]
        answers, _ = answered(Fleet(outline, ConsistentHash, ["r0"]), sessions)
        mean = sum((a.end_s - a.turn.arrival_s) / a.usage.output_tokens for a in answers) / len(answers)
        assert mean == pytest.approx(whole, rel=off)


@pytest.mark.parametrize(("number", "lost"), [(2, 200), (3, 40), (4, 0)])
def test_what_does_not_fit_is_lost_oldest_first_from_its_leading_end(number, lost):
    """Eight histories of 200 tokens, for 480 on the host and 480 only on the device: 640 are lost."""
    sessions = [
        session(f"c{n}", (100, 101), (10, 10), arrival_s=50.0 + n, think_s=60.0, first_turn=1)
        for n in range(8)
    ]
    fleet = Fleet(outline, ConsistentHash, ["r0"], start_s=-20.0)
    fleet.place(sessions)
    (answer,), _ = answered(fleet, sessions[number : number + 1])
    assert answer.usage.recomputed_tokens == lost
