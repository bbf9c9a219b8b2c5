"""Traces cut to a context, parts of traces, and the statistics of traces."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax.workload import Trace, WorkloadError, cap_context, summarize, with_min_turns
from tests.workload.helpers import conversation, traces


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
