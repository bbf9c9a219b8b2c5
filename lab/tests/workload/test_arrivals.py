"""Sessions: arrivals, think times, limits, scale, and starts in mid-life."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.tests.workload.helpers import conversation, traces
from pensieve_lab.workload import (
    ExponentialThink,
    LognormalThink,
    RecordedThink,
    Session,
    Trace,
    WorkloadError,
    make_sessions,
    start_mid_life,
)

TRACE = Trace("t", tuple(conversation(str(i), *[(i + 1, 10)] * (1 + i % 4)) for i in range(10)))
SAME_TIME = Trace("s", tuple(conversation(str(i), (1, 1), arrival_s=3.0) for i in range(3)))
THINK = ExponentialThink(60)
rates = st.floats(0.01, 100)
seeds = st.integers(0, 2**63)


@given(
    traces(min_conversations=1),
    rates,
    seeds,
    st.none() | st.integers(1, 30),
    st.none() | st.floats(0.1, 20),
    st.floats(0.01, 10),
)
def test_poisson_sessions_are_sorted_limited_and_repeatable(
    trace, rate, seed, num_sessions, duration_s, scale
):
    if num_sessions is None and duration_s is not None:
        duration_s = min(duration_s, 30 * scale / rate)
    options = {"rate_per_s": rate, "think": THINK, "seed": seed, "time_scale": scale}
    sessions = make_sessions(trace, num_sessions=num_sessions, duration_s=duration_s, **options)
    arrivals = [session.arrival_s for session in sessions]
    assert arrivals == sorted(arrivals)
    assert len(sessions) <= (num_sessions or math.inf)
    assert all(arrival_s < (duration_s or math.inf) for arrival_s in arrivals)
    if num_sessions is None and duration_s is None:
        assert sorted(s.conversation.conversation_id for s in sessions) == sorted(
            c.conversation_id for c in trace.conversations
        )
    assert len({session.conversation.conversation_id for session in sessions}) == len(sessions)
    assert make_sessions(trace, num_sessions=num_sessions, duration_s=duration_s, **options) == sessions


@given(seeds)
def test_a_rate_moves_arrivals_and_nothing_else(seed):
    slow = make_sessions(TRACE, rate_per_s=1, think=THINK, seed=seed)
    fast = make_sessions(TRACE, rate_per_s=4, think=THINK, seed=seed)
    assert [(s.conversation, s.think_s) for s in slow] == [(s.conversation, s.think_s) for s in fast]
    assert [s.arrival_s / 4 for s in slow] == pytest.approx([s.arrival_s for s in fast])


@given(seeds, st.integers(1, 25), st.integers(1, 25))
def test_a_shorter_run_is_the_beginning_of_a_longer_one(seed, one, other):
    short, long = sorted((one, other))
    options = {"rate_per_s": 1, "think": THINK, "seed": seed}
    sessions = make_sessions(TRACE, num_sessions=long, **options)
    assert make_sessions(TRACE, num_sessions=short, **options) == sessions[:short]
    within = make_sessions(TRACE, duration_s=sessions[-1].arrival_s, **options)
    assert within == sessions[:-1]


@given(seeds, st.floats(0.01, 100))
def test_a_time_scale_stretches_all_times(seed, scale):
    plain = make_sessions(TRACE, rate_per_s=1, think=THINK, seed=seed)
    scaled = make_sessions(TRACE, rate_per_s=1, think=THINK, seed=seed, time_scale=scale)
    for one, other in zip(plain, scaled, strict=True):
        assert other.arrival_s == pytest.approx(one.arrival_s * scale)
        assert other.think_s == pytest.approx([think_s * scale for think_s in one.think_s])


def test_poisson_gaps_are_exponential():
    sessions = make_sessions(TRACE, rate_per_s=5, think=THINK, seed=11, num_sessions=20_000)
    arrivals = np.array([session.arrival_s for session in sessions])
    gaps = np.diff(arrivals, prepend=0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)
    assert np.mean(gaps > 0.2) == pytest.approx(math.exp(-1), abs=0.02)
    # Independent of one another: what a sum of sines would not be.
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_every_conversation_is_used_before_one_is_used_again():
    sessions = make_sessions(TRACE, rate_per_s=1, think=THINK, seed=4, num_sessions=25)
    ids = [session.conversation.conversation_id for session in sessions]
    assert {i for i in ids[:10]} == {str(i) for i in range(10)}
    assert {i for i in ids[10:20]} == {f"{i}@2" for i in range(10)}
    assert all(i.endswith("@3") for i in ids[20:])
    assert [i.removesuffix("@2") for i in ids[10:20]] != ids[:10]


def test_an_id_that_looks_like_a_second_use_stays_unique():
    """Two sessions had one id, and one of them was lost."""
    trace = Trace("t", (conversation("a", (1, 1)), conversation("a@2", (1, 1))))
    sessions = make_sessions(trace, rate_per_s=1, think=THINK, seed=0, num_sessions=8)
    assert len({session.conversation.conversation_id for session in sessions}) == 8


@given(traces(min_conversations=1, arrivals=True), seeds)
def test_recorded_arrivals_belong_to_their_conversations(trace, seed):
    sessions = make_sessions(trace, recorded=trace, think=THINK, seed=seed)
    assert sorted(s.conversation.conversation_id for s in sessions) == sorted(
        c.conversation_id for c in trace.conversations
    )
    assert all(session.arrival_s == session.conversation.arrival_s for session in sessions)
    assert [s.arrival_s for s in sessions] == sorted(s.arrival_s for s in sessions)


def test_the_arrivals_of_one_trace_can_drive_another():
    arrivals = Trace("a", tuple(conversation(str(i), (1, 1), arrival_s=t) for i, t in enumerate((9, 1, 4.5))))
    sessions = make_sessions(TRACE, recorded=arrivals, think=THINK, seed=0, time_scale=2, duration_s=10)
    assert [session.arrival_s for session in sessions] == [2, 9]
    assert all(session.conversation in TRACE.conversations for session in sessions)


@pytest.mark.parametrize("seed", range(5))
def test_recorded_pauses_come_at_another_rate(seed):
    times = (0.0, 1.0, 1.0, 4.0)
    arrivals = Trace("a", tuple(conversation(str(i), (1, 1), arrival_s=t) for i, t in enumerate(times)))
    sessions = make_sessions(TRACE, rate_per_s=3, recorded=arrivals, think=THINK, seed=seed, num_sessions=7)
    found = np.diff([0.0, *(session.arrival_s for session in sessions)])
    pauses = [0.25, 0.0, 0.75]  # of a mean of a third
    start = pauses.index(round(found[0], 9))
    assert found == pytest.approx([pauses[(start + i) % 3] for i in range(7)])
    assert {one.conversation.conversation_id for one in sessions} <= {str(i) for i in range(10)}


def test_pauses_begin_elsewhere_with_another_seed():
    times = np.cumsum(range(100)).tolist()
    arrivals = Trace("a", tuple(conversation(str(i), (1, 1), arrival_s=t) for i, t in enumerate(times)))
    firsts = {
        make_sessions(TRACE, rate_per_s=1, recorded=arrivals, think=THINK, seed=seed)[0].arrival_s
        for seed in range(10)
    }
    assert len(firsts) > 5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "rate_per_s"),
        ({"rate_per_s": 1, "recorded": TRACE}, "arrival_s of conversation '0' of 't'"),
        ({"rate_per_s": 1, "recorded": SAME_TIME}, "recorded"),
        ({"rate_per_s": 0}, "rate_per_s"),
        ({"rate_per_s": math.inf}, "rate_per_s"),
        ({"recorded": TRACE}, "arrival_s of conversation '0' of 't'"),
        ({"rate_per_s": 1, "time_scale": 0}, "time_scale"),
        ({"rate_per_s": 1, "num_sessions": 0}, "num_sessions"),
        ({"rate_per_s": 1, "seed": -1}, "seed"),
        ({"rate_per_s": 1, "duration_s": -1}, "duration_s"),
        ({"rate_per_s": 1, "think": RecordedThink()}, "think_s of turn 1 of conversation '"),
    ],
)
def test_contradictions_are_refused(options, field):
    with pytest.raises(WorkloadError) as caught:
        make_sessions(TRACE, **{"think": THINK, "seed": 0} | options)
    assert caught.value.field.startswith(field)


def test_a_trace_without_conversations_makes_no_sessions():
    with pytest.raises(WorkloadError, match="at least one conversation"):
        make_sessions(Trace("empty", ()), rate_per_s=1, think=THINK, seed=0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"arrival_s": -1}, "arrival_s"),
        ({"think_s": (1,)}, "think_s"),
        ({"think_s": (1, math.nan)}, "think_s[1]"),
        ({"first_turn": 3}, "first_turn"),
        ({"first_turn": -1}, "first_turn"),
    ],
)
def test_a_session_refuses_what_cannot_be(options, field):
    values = {"arrival_s": 0, "think_s": (1, 2)} | options
    with pytest.raises(WorkloadError) as caught:
        Session(conversation("a", (1, 1), (1, 1), (1, 1)), **values)
    assert caught.value.field == field


def test_a_session_in_mid_life_knows_its_history():
    session = Session(conversation("a", (1, 2), (3, 4), (5, 6)), 7.0, (10.0, 20.0), first_turn=2)
    assert (session.num_history_tokens, session.last_active_s) == (10, -13.0)
    whole = Session(session.conversation, 7.0, (10.0, 20.0))
    assert (whole.num_history_tokens, whole.last_active_s) == (0, 7.0)


def test_mid_life_goes_on_with_the_next_turn():
    one = conversation("a", (5, 100), (5, 100), (5, 100))
    sessions = [Session(one, 10.0, (20.0, 30.0))]
    # Sent at 10, 10 + 1 + 20 = 31 and 31 + 1 + 30 = 62.
    for at_s, first_turn in [(0, 0), (10, 0), (10.5, 1), (31, 1), (31.5, 2), (62, 2)]:
        (started,) = start_mid_life(sessions, at_s=at_s, token_s=0.01)
        assert started.first_turn == first_turn
        assert started.arrival_s == pytest.approx((10, 31, 62)[first_turn] - at_s)
        assert (started.conversation, started.think_s) == (one, (20.0, 30.0))
    assert start_mid_life(sessions, at_s=62.5, token_s=0.01) == []
    with pytest.raises(WorkloadError, match="first_turn is 1, but must be 0"):
        start_mid_life(start_mid_life(sessions, at_s=20, token_s=0.01), at_s=5, token_s=0.01)


@given(seeds, st.floats(0, 400), st.floats(0, 0.1))
def test_mid_life_loses_no_turn_that_is_still_to_come(seed, at_s, token_s):
    sessions = make_sessions(TRACE, rate_per_s=0.1, think=THINK, seed=seed, num_sessions=20)
    started = start_mid_life(sessions, at_s=at_s, token_s=token_s)
    assert [s.arrival_s for s in started] == sorted(s.arrival_s for s in started)
    to_come = 0
    for session in sessions:
        answers_s = [turn.output_tokens * token_s for turn in session.conversation.turns[:-1]]
        pauses = [answer_s + think_s for answer_s, think_s in zip(answers_s, session.think_s, strict=True)]
        to_come += sum(sent >= at_s for sent in itertools.accumulate(pauses, initial=session.arrival_s))
    assert sum(len(s.conversation.turns) - s.first_turn for s in started) == to_come
    assert all(s.last_active_s <= 1e-6 for s in started if s.first_turn and token_s == 0)


LONG = conversation("a", *[(1, 1)] * 50_001)


def test_exponential_think_times():
    drawn = np.array(ExponentialThink().draw(LONG, np.random.default_rng(5)))
    assert drawn.mean() == pytest.approx(60, rel=0.02)
    assert np.quantile(drawn, 0.9) == pytest.approx(60 * math.log(10), rel=0.03)
    assert ExponentialThink(0).draw(conversation("a", (1, 1), (1, 1)), np.random.default_rng(5)) == (0.0,)


def test_lognormal_think_times():
    drawn = np.log(LognormalThink(5.21, 1.75).draw(LONG, np.random.default_rng(5)))
    assert drawn.mean() == pytest.approx(5.21, abs=0.03)
    assert drawn.std() == pytest.approx(1.75, rel=0.02)


def test_recorded_think_times_prefer_think_over_gap_over_chance():
    one = conversation("a", *[(1, 1)] * 4, gaps=(None, 30, 40, None), thinks=(None, 3, None, None))
    rng = np.random.default_rng(5)
    think = RecordedThink(otherwise=ExponentialThink(0)).draw(one, rng)
    assert think == (3, 40, 0)
    with pytest.raises(WorkloadError, match="think_s of turn 3 of conversation 'a'"):
        RecordedThink().draw(one, rng)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ExponentialThink(-1), "mean_s"),
        (lambda: LognormalThink(math.nan, 1), "mu"),
        (lambda: LognormalThink(1, 0), "sigma"),
    ],
)
def test_impossible_think_times_are_refused(make, field):
    with pytest.raises(WorkloadError) as caught:
        make()
    assert caught.value.field == field
