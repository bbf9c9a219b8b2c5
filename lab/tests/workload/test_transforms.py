"""Traces cut to a context, parts of traces, and the statistics of traces."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.tests.workload.helpers import conversation, traces
from pensieve_lab.workload import (
    Trace,
    WorkloadError,
    between,
    cap_context,
    from_first_arrival,
    split_by_session,
    summarize,
    with_min_turns,
)


@given(traces(), st.integers(2, 300_000))
def test_a_cap_keeps_the_turns_that_fit(trace, limit):
    capped = {c.conversation_id: c for c in cap_context(trace, limit).conversations}
    for whole in trace.conversations:
        fitting = [k for k in range(1, len(whole.turns) + 1) if whole.num_history_tokens(k) <= limit]
        kept = capped.get(whole.conversation_id)
        assert (kept.turns if kept else ()) == whole.turns[: max(fitting, default=0)]
        assert kept is None or kept.arrival_s == whole.arrival_s


@given(traces(), st.integers(1, 6))
def test_min_turns_keeps_whole_conversations(trace, min_turns):
    kept = with_min_turns(trace, min_turns).conversations
    assert kept == tuple(c for c in trace.conversations if len(c.turns) >= min_turns)


@given(traces())
def test_a_split_is_of_all_and_of_nothing_twice(trace):
    halves = split_by_session(trace)
    chosen, held_out = ({c.conversation_id for c in half.conversations} for half in halves)
    assert not chosen & held_out
    assert chosen | held_out == {c.conversation_id for c in trace.conversations}
    assert split_by_session(halves[0])[0] == halves[0] and split_by_session(halves[1])[1] == halves[1]


def test_a_split_goes_by_the_session_and_by_nothing_else():
    """The result is pinned: earlier results were measured on this half."""
    names = [f"session {number}" for number in range(2000)]
    whole = Trace("t", tuple(conversation(name, (1, 1)) for name in names))
    _, held_out = split_by_session(whole)
    ids = [c.conversation_id for c in held_out.conversations]
    assert ids[:6] == ["session 1", "session 6", "session 8", "session 10", "session 11", "session 12"]
    assert 900 < len(ids) < 1100
    halves = split_by_session(
        Trace("t", tuple(conversation(f"user:{name}/x", (1, 1)) for name in range(200)))
    )
    assert all(60 < len(half.conversations) < 140 for half in halves), "an id's spelling says nothing"


@pytest.mark.parametrize("session", ["session 0", "session 1"])
def test_parts_of_a_session_stay_in_its_half(session):
    def part(name):
        return dataclasses.replace(conversation(name, (1, 1)), session_id=session)

    parts = tuple(part(f"part {number}") for number in range(20))
    whole = conversation(session, (1, 1))
    chosen, held_out = split_by_session(Trace("t", (whole, *parts)))
    mine, other = (held_out, chosen) if session == "session 1" else (chosen, held_out)
    assert mine.conversations == (whole, *parts) and not other.conversations


def test_a_recording_between_two_times():
    early = conversation("early", (1, 1), (2, 2), gaps=(None, 50.0), arrival_s=9.0)
    kept = conversation("kept", (3, 3), (4, 4), (5, 5), gaps=(None, 20.0, 61.0), arrival_s=20.0)
    late = conversation("late", (6, 6), arrival_s=100.0)
    (found,) = between(Trace("t", (early, kept, late)), 10.0, 100.0).conversations
    assert found == dataclasses.replace(kept, arrival_s=10.0, turns=kept.turns[:2])
    with pytest.raises(WorkloadError, match="arrival_s of 'x'"):
        between(Trace("t", (conversation("x", (1, 1)),)), 0.0, 1.0)
    with pytest.raises(WorkloadError, match="end_s"):
        between(Trace("t", ()), 2.0, 2.0)


def test_a_recording_from_its_first_conversation_on():
    late, first = (
        conversation(name, (1, 1), arrival_s=time_s) for name, time_s in (("a", 90.0), ("b", 60.0))
    )
    other = conversation("c", (1, 1))
    moved = from_first_arrival(Trace("t", (late, first, other)))
    assert [one.arrival_s for one in moved.conversations] == [30.0, 0.0, None]
    assert from_first_arrival(Trace("t", (other,))) == Trace("t", (other,))


def test_limits_are_checked():
    with pytest.raises(WorkloadError, match="max_context_tokens is 1"):
        cap_context(Trace("t", ()), 1)
    with pytest.raises(WorkloadError, match="min_turns is 0"):
        with_min_turns(Trace("t", ()), 0)


def test_a_summary_counts_turns_histories_and_recorded_times():
    trace = Trace("t", (conversation("a", (10, 20), (30, 40), gaps=(None, 6)), conversation("b", (1, 2))))
    summary = summarize(trace)
    assert (summary.num_conversations, summary.num_turns, summary.digest) == (2, 3, trace.digest)
    assert (summary.turns.mean, summary.turns.max) == (1.5, 2)
    assert (summary.prompt_tokens.p50, summary.prompt_tokens.max) == (10, 30)
    assert summary.follow_up_prompt_tokens.mean == 30
    assert summary.output_tokens.max == 40
    assert (summary.input_tokens.max, summary.input_tokens.p50) == (60, 10)
    assert (summary.gap_s.count, summary.gap_s.mean, summary.think_s) == (1, 6, None)
    assert json.loads(json.dumps(dataclasses.asdict(summary)))["input_tokens"]["max"] == 60


def test_an_empty_trace_has_no_statistics():
    assert summarize(Trace("t", ())).turns is None
