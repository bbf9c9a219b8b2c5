"""The generator: the paper's means, its limit, heavy tails, seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_lab.workload import (
    SHAREGPT,
    ULTRACHAT,
    ConversationShape,
    Lengths,
    TurnTrace,
    WorkloadError,
    generate_trace,
    summarize,
)
from pensieve_lab.workload.synthetic import _fitting_turns

# The paper's Table 2.
TABLE_2 = {"sharegpt": (5.56, 37.77, 204.58), "ultrachat": (3.86, 51.78, 257.81)}


@pytest.mark.parametrize(
    "shape", [SHAREGPT, pytest.param(ULTRACHAT, marks=pytest.mark.long)], ids=lambda shape: shape.name
)
def test_the_means_are_those_of_the_paper(shape):
    summary = summarize(generate_trace(shape, num_conversations=50_000, seed=20251))
    found = (summary.turns.mean, summary.prompt_tokens.mean, summary.output_tokens.mean)
    assert found == pytest.approx(TABLE_2[shape.name], rel=0.02)
    assert summary.input_tokens.max <= 16_384


def test_turns_have_a_heavy_tail():
    turns = summarize(generate_trace(SHAREGPT, num_conversations=20_000, seed=1)).turns
    # A geometric distribution of this mean has its 99th percentile at 24.
    assert turns.p50 <= 4
    assert turns.p99 >= 30


lengths = st.builds(Lengths, st.floats(1.1, 500), st.floats(0.1, 2))
shapes = st.builds(ConversationShape, st.just("any"), lengths, lengths, lengths)


@given(shape=shapes, seed=st.integers(0, 2**32), max_context_tokens=st.integers(2, 3000))
@settings(deadline=None, max_examples=40)
def test_no_conversation_outgrows_the_context_and_a_seed_says_all(shape, seed, max_context_tokens):
    def make():
        return generate_trace(shape, num_conversations=20, seed=seed, max_context_tokens=max_context_tokens)

    trace = make()
    assert len(trace.conversations) == 20
    assert all(len(c.turns) >= 1 and c.num_tokens <= max_context_tokens for c in trace.conversations)
    assert make() == trace


def test_seeds_differ():
    digests = {generate_trace(ULTRACHAT, num_conversations=50, seed=seed).digest for seed in range(5)}
    assert len(digests) == 5


@pytest.mark.parametrize(("mean", "sigma"), [(1.5, 0.5), (40, 1.2), (200, 0.3), (3, 2)])
def test_lengths_have_their_mean(mean, sigma):
    drawn = Lengths(mean, sigma).draw(np.random.default_rng(3), 200_000, at_most=10**6)
    error = drawn.std() / np.sqrt(drawn.size)
    assert drawn.min() >= 1
    assert abs(drawn.mean() - mean) < 5 * error


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Lengths(1, 1), "mean"),
        (lambda: Lengths(2, 0), "sigma"),
        (lambda: generate_trace(SHAREGPT, num_conversations=0, seed=0), "num_conversations"),
        (lambda: generate_trace(SHAREGPT, num_conversations=1, seed=-1), "seed"),
        (
            lambda: generate_trace(SHAREGPT, num_conversations=1, seed=0, max_context_tokens=1),
            "max_context_tokens",
        ),
    ],
)
def test_impossible_arguments_are_refused(make, field):
    with pytest.raises(WorkloadError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(("max_context_tokens", "num_turns"), [(60, 3), (59, 2), (40, 2), (39, 1)])
def test_a_conversation_may_fill_the_context_exactly(max_context_tokens, num_turns):
    turns = _fitting_turns([(5, 15)] * 3, max_context_tokens)
    assert turns == (TurnTrace(5, 15),) * num_turns


@pytest.mark.parametrize(
    ("first", "fitted"),
    [((30, 30), (30, 10)), ((39, 1), (39, 1)), ((40, 5), (39, 1)), ((90, 90), (39, 1)), ((1, 39), (1, 39))],
)
def test_a_first_turn_is_cut_to_the_context_and_leaves_a_token_for_the_reply(first, fitted):
    assert _fitting_turns([first], 40) == (TurnTrace(*fitted),)
