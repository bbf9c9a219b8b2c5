"""Users, routing, replicas, mid-life starts and reported figures."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lab.tests.simulator.workloads import COSTS, MAX_CONTEXT_TOKENS, PROFILE, make_sessions, small_config
from pensieve_jax import ConfigError
from pensieve_jax.core.outputs import Usage
from pensieve_lab.simulator import Outcome, Replica, Scenario, figures, simulate
from pensieve_lab.simulator.routing import AffinityRouter, LeastLoadedRouter, RandomRouter
from pensieve_lab.workload import Answer, Client, ConversationTrace, Session, TurnTrace, UserTurn

USAGE = Usage(10, 0, 0, 0, 10, 20)
HOST_S = PROFILE.host.step_s + PROFILE.host.row_s + PROFILE.host.turn_s  # before a lonely turn's first step


def session(name, *turns, arrival_s=0.0, think_s=1.0, first_turn=0):
    trace = tuple(TurnTrace(*lengths) for lengths in turns)
    return Session(ConversationTrace(name, trace), arrival_s, (think_s,) * (len(turns) - 1), first_turn)


def scenario(config=None, **changes):
    return Scenario(
        config=config or small_config(),
        profile=PROFILE,
        cost_model=COSTS,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        **changes,
    )


def test_users_answer_when_they_have_thought():
    client = Client([session("b", (10, 20), (5, 6), think_s=3.0), session("a", (1, 1), arrival_s=0.5)], 400)
    first, other = client.take(), client.take()
    assert (first.conversation_id, first.arrival_s, first.num_history_tokens) == ("b", 0.0, 0)
    assert other.is_last and not first.is_last and client.next_s == math.inf
    client.receive(Answer(first, 0, 1.0, 2.0, USAGE))
    client.receive(Answer(other, 0, 1.0, 2.5, USAGE))
    second = client.take()
    assert (second.arrival_s, second.num_history_tokens, second.turn_index) == (5.0, 30, 1)
    assert client.num_sent == 3


def test_conversations_end_where_the_context_does():
    client = Client([session("a", (10, 80), (5, 50), (1, 1)), session("b", (200, 1))], 100)
    assert client.num_refused == 1  # b has no room for a first turn
    first = client.take()
    client.receive(Answer(first, 0, 1.0, 2.0, USAGE))
    second = client.take()
    assert second.output_tokens == 5  # cut at 100
    client.receive(Answer(second, 0, 1.0, 2.0, USAGE))
    assert client.num_refused == 2 and client.next_s == math.inf


def test_a_lonely_turn_takes_what_the_profile_says():
    """A prompt of 20 tokens and a reply of 5: the host time before the first step, and five steps."""
    (answer,) = simulate(scenario(), [session("a", (20, 5), arrival_s=3.0)]).answers
    assert answer.usage == Usage(20, 0, 0, 0, 20, 5)
    begun_s = 3 + HOST_S
    assert begun_s + 6.5e-3 < answer.first_token_s < begun_s + 8.5e-3
    assert (answer.end_s - answer.first_token_s) / 4 == pytest.approx(7.2e-3, rel=0.05)


@dataclasses.dataclass
class Loaded:
    num_unfinished: int


def test_routers():
    servers = [Loaded(2), Loaded(1), Loaded(1)]
    assert LeastLoadedRouter(0).choose("a", servers) == 1
    affinity = AffinityRouter(0)
    assert [affinity.choose(name, servers) for name in "abcda"] == [0, 1, 2, 0, 0]
    drawn = [[RandomRouter(seed).choose("a", servers) for _ in range(1)] for seed in range(20)]
    assert {index for (index,) in drawn} == {0, 1, 2}


@pytest.mark.parametrize("routing", ["affinity", "random", "least-loaded"])
def test_replicas_step_the_same_without_decode_runs(routing):
    sessions = make_sessions(3, num_sessions=40, gap_s=0.1)
    stepped, advanced = (
        simulate(scenario(num_replicas=3, routing=routing, decode_runs=decode_runs), sessions)
        for decode_runs in (False, True)
    )
    assert [dataclasses.asdict(a) for a in stepped.answers] == [
        dataclasses.asdict(a) for a in advanced.answers
    ]
    assert stepped.counters == advanced.counters
    assert {answer.replica for answer in advanced.answers} == {0, 1, 2}


def test_affinity_finds_more_and_more_replicas_are_faster():
    sessions = make_sessions(5, num_sessions=60, gap_s=0.05)
    found = {
        (routing, count): figures(
            simulate(scenario(num_replicas=count, routing=routing), sessions), count
        )
        for routing, count in (("affinity", 1), ("affinity", 3), ("random", 3), ("least-loaded", 3))
    }  # fmt: skip
    hits = {key: one["gpu_hit_rate"] + one["cpu_hit_rate"] for key, one in found.items()}
    assert hits["affinity", 3] > hits["random", 3] + 0.1
    assert hits["affinity", 3] > hits["least-loaded", 3]
    latency = {key: one["normalized_latency_s"]["mean"] for key, one in found.items()}
    assert latency["affinity", 3] < latency["affinity", 1]
    assert len({one["history_tokens"] for one in found.values()}) == 1


def test_mid_life_finds_what_was_said_before():
    turns = ((30, 40), (30, 40), (10, 10))
    outcome = simulate(scenario(), [session("a", *turns, arrival_s=0.4, first_turn=2)])
    (answer,) = outcome.answers
    assert answer.usage == Usage(10, 139, 0, 0, 11, 10)
    stateless = scenario(small_config(stateful=False, cpu_pages=0))
    (answer,) = simulate(stateless, [session("a", *turns, arrival_s=0.4, first_turn=2)]).answers
    assert answer.usage == Usage(10, 0, 0, 139, 11, 10)


def test_mid_life_beyond_memory_moves_and_drops_as_the_cache_decides():
    """Twelve histories of 140 tokens, for 640 on the device and 480 on the host: the oldest lose most."""
    sessions = [
        session(f"c{i}", (60, 80), (10, 10), arrival_s=100.0 - i, think_s=200.0 - 2 * i, first_turn=1)
        for i in range(12)  # c11 was the last to be active, and returns first
    ]
    outcome = simulate(scenario(small_config(policy="lru")), sessions)
    usage = {answer.turn.conversation_id: answer.usage for answer in outcome.answers}
    assert usage["c11"].reused_gpu_tokens + usage["c11"].swapped_in_tokens == 139
    assert usage["c0"].recomputed_tokens > 0
    assert sum(one.swapped_in_tokens for one in usage.values()) > 0


def test_a_window_counts_what_was_answered_in_it():
    sessions = make_sessions(1, num_sessions=60, gap_s=0.1)
    whole = simulate(scenario(), sessions)
    part = simulate(scenario(warm_up_s=2.0, window_s=1.5), sessions)
    expected = [a for a in whole.answers if 2.0 <= a.end_s < 3.5]
    assert len(part.answers) == pytest.approx(len(expected), abs=8) and part.seconds == 1.5
    assert part.num_unfinished > 0 and whole.num_unfinished == 0
    assert all(1.9 < answer.end_s < 3.7 for answer in part.answers)
    assert 0 < part.counters["num_steps"] < whole.counters["num_steps"]


def test_steps_by_bucket():
    """A single turn takes a step for its prompt, and a step of one token for each following token."""
    outcome = simulate(scenario(), [session("a", (20, 5))])
    (answer,), steps = outcome.answers, {b: t for b, t in outcome.steps.items() if t.num_steps}
    assert sum(total.num_steps for total in steps.values()) == outcome.counters["num_steps"] == 5
    assert sum(total.num_tokens for total in steps.values()) == 20 + 4
    seconds = sum(total.seconds for total in steps.values())
    assert seconds == pytest.approx(answer.end_s - HOST_S), "steps follow one another"
    reported = figures(outcome, 1)["steps"]
    assert sum(one["num_steps"] * one["mean_s"] for one in reported.values()) == pytest.approx(seconds)


def test_the_drain_changes_nothing_of_the_window():
    sessions = make_sessions(1, num_sessions=60, gap_s=0.1)
    plain = simulate(scenario(warm_up_s=2.0, window_s=1.5), sessions)
    seen = []
    drained = simulate(scenario(warm_up_s=2.0, window_s=1.5, drain_s=3.0), sessions, seen.append)
    assert drained.counters == plain.counters and drained.steps == plain.steps
    assert [answer.end_s for answer in drained.answers] == [answer.end_s for answer in plain.answers]
    assert sum(answer.end_s > 3.7 for answer in seen) > 0, "no answer ended after 3.7 s"
    steps = simulate(scenario(), sessions).steps
    assert all(0 <= drained.steps[bucket].num_steps <= steps[bucket].num_steps for bucket in steps)


def test_what_is_reported():
    turn = UserTurn("a", 1, 1.0, 50, 10, 4, is_last=True)
    usage = Usage(10, 20, 10, 19, 11, 4, 1, 7, 0)
    answers = [Answer(turn, 0, 3.0, 9.0, usage), Answer(turn, 0, 2.0, 5.0, usage)]
    counters = simulate(scenario(), []).counters | {
        "device_busy_s": 6.0,
        "padding_s": 0.3,
        "num_suspensions": 3.0,
    }
    found = figures(
        Outcome(answers=answers, counters=counters, steps={}, seconds=4.0, num_unfinished=2, num_refused=1), 2
    )
    assert found["requests_per_s"] == 0.5 and found["output_tokens_per_s"] == 2.0
    assert found["normalized_latency_s"] == pytest.approx({"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert found["first_token_s"]["mean"] == 1.5 and found["output_token_s"]["mean"] == 1.5
    assert found["gpu_hit_rate"] == pytest.approx(40 / 98)
    assert found["cpu_hit_rate"] == pytest.approx(20 / 98)
    assert (found["recomputed_tokens"], found["wasted_tokens"]) == (38, 14)
    assert found["padding_share_of_step_time"] == pytest.approx(0.05)
    assert found["device_busy"] == 0.75 and found["num_suspensions"] == 3


def test_nothing_to_serve():
    found = figures(simulate(scenario(), []), 1)
    assert found["num_requests"] == 0 and found["normalized_latency_s"] is None
    assert found["requests_per_s"] is None and found["padding_share_of_step_time"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_replicas", 0), ("routing", "nearest"), ("warm_up_s", -1.0), ("window_s", 0.0), ("drain_s", -1.0)],
)
def test_refuses(field, value):
    with pytest.raises(ConfigError, match=field):
        scenario(**{field: value})


def test_forgets_conversations_without_state():
    """Thousands of ended conversations leave nothing behind."""
    replica = Replica(small_config(), PROFILE, COSTS)
    for number in range(600):
        replica.clock.advance(1.0)
        replica.submit(UserTurn(f"c{number}", 0, 0.0, 0, 20, 2, is_last=True))
        while replica.has_unfinished:
            replica.step(math.inf)
    assert len(replica._sequences) < 200
    replica.check_integrity()
