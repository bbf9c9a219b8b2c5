"""The model of returns against a slow one, its shrinkage, and what the log derives from turns."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax import ConfigError
from pensieve_jax.cache import LearnedState
from pensieve_jax.cache.order.policy_selector import PolicyLosses
from pensieve_jax.cache.order.return_log import ReturnLog
from pensieve_jax.cache.order.returns import (
    EDGES_S,
    HORIZON_S,
    NUM_BINS,
    NUM_BUCKETS,
    UNKNOWN,
    ReturnModel,
    bin_of,
    bucket_of,
    exposure_of,
    hazards_of,
    index_of,
)

ENDS_S = (*EDGES_S[1:], HORIZON_S)
times = st.floats(0, 30_000, allow_nan=False)


def slow_index(hazards):
    """Compute the index by iterating over every horizon of every bin."""
    index = np.zeros_like(hazards)
    for bucket, begin in np.ndindex(hazards.shape):
        surviving, returned, held_s = 1.0, 0.0, 0.0
        for i in range(begin, NUM_BINS):
            rate, width_s = hazards[bucket, i], ENDS_S[i] - EDGES_S[i]
            goes = surviving * (1 - math.exp(-rate * width_s))
            returned, held_s, surviving = returned + goes, held_s + goes / rate, surviving - goes
            index[bucket, begin] = max(index[bucket, begin], returned / held_s)
    return index


@given(
    st.lists(st.floats(1e-6, 0.5), min_size=NUM_BINS, max_size=NUM_BINS),
)
def test_the_index_equals_that_of_an_iteration_over_all_horizons(rates):
    hazards = np.array([rates])
    np.testing.assert_allclose(index_of(hazards), slow_index(hazards), rtol=1e-6)


def test_if_rates_only_fall_the_index_is_the_rate():
    hazards = np.geomspace(0.3, 1e-5, NUM_BINS)[None]
    np.testing.assert_allclose(index_of(hazards), hazards, rtol=1e-9)


def test_an_imminent_return_raises_the_value():
    """No conversation returns in the first minute, all return in the second."""
    hazards = np.full((1, NUM_BINS), 1e-6)
    near = [i for i in range(NUM_BINS) if 60 <= EDGES_S[i] < 120]
    hazards[0, near] = 0.5
    index = index_of(hazards)[0]
    before = index[: near[0] + 1]
    assert (np.diff(before) > 0).all() and before[0] > 1 / 200 and index[near[-1] + 1] < 1e-3


@given(st.floats(0, 1e9), st.floats(0, 30_000))
def test_a_bin_begins_at_its_edge_in_absolute_time(last_active_s, idle_s):
    now_s = last_active_s + idle_s
    found = bin_of(last_active_s, now_s)
    assert found == 0 or last_active_s + EDGES_S[found] <= now_s
    assert found + 1 == NUM_BINS or now_s < last_active_s + EDGES_S[found + 1]


@given(st.lists(st.tuples(st.integers(0, NUM_BUCKETS - 1), times), max_size=20))
def test_exposure_is_the_time_spent_in_each_bin(idle):
    exposure_s = exposure_of([b for b, _ in idle], np.array([t for _, t in idle], float))
    expected = np.zeros((NUM_BUCKETS, NUM_BINS))
    for (bucket, idle_s), i in itertools.product(idle, range(NUM_BINS)):
        expected[bucket, i] += max(min(idle_s, ENDS_S[i]) - EDGES_S[i], 0.0)
    np.testing.assert_allclose(exposure_s, expected)
    assert exposure_s.sum() == pytest.approx(sum(min(t, HORIZON_S) for _, t in idle))


def test_without_evidence_the_rate_is_one_over_idle_time():
    zeros = np.zeros((NUM_BUCKETS, NUM_BINS))
    hazards = hazards_of(zeros, zeros)
    middles_s = [math.sqrt(max(a, 0.5) * b) for a, b in zip(EDGES_S, ENDS_S, strict=True)]
    products = hazards * np.maximum(middles_s, 0.5)
    np.testing.assert_allclose(products, products[0, 0])


def test_rates_beyond_the_observed_time_are_low():
    """All returned within ten seconds, and none was idle for longer: beyond, the rate falls as 1 / idle."""
    model = ReturnModel()
    bucket = bucket_of(is_first=True, prompt_tokens=10, output_tokens=10)
    for i in range(1000):
        model.close(bucket, 0.01 * i, returned=True)
    model.fit(np.zeros((NUM_BUCKETS, NUM_BINS)))
    seen = model.index(bucket, bin_of(0, 5.0))
    beyond = [model.index(bucket, i) for i in range(bin_of(0, 20.0), NUM_BINS)]
    assert beyond == sorted(beyond, reverse=True) and beyond[0] < seen and beyond[-1] < 1e-2 * seen


def test_a_bucket_with_different_habits_separates_from_the_rest():
    model = ReturnModel()
    quick = bucket_of(is_first=False, prompt_tokens=10, output_tokens=10)
    slow = bucket_of(is_first=True, prompt_tokens=10_000, output_tokens=10)
    for _ in range(200):
        model.close(quick, 5.0, returned=True)
        model.close(slow, HORIZON_S, returned=False)
    model.fit(np.zeros((NUM_BUCKETS, NUM_BINS)))
    assert model.index(quick, bin_of(0, 5.0)) > 20 * model.index(slow, bin_of(0, 5.0))
    assert model.index(slow, bin_of(0, 5.0)) < model.index(UNKNOWN, bin_of(0, 5.0))


def test_old_returns_count_less_if_there_are_many():
    returns, exposure_s = np.zeros((2, NUM_BUCKETS, NUM_BINS))
    returns[1, 3], exposure_s[1, 3] = 49_999.0, 1e6
    model = ReturnModel(returns, exposure_s)
    for _ in range(2):
        model.close(1, 2.0, returned=True)
    assert model.returns.sum() == pytest.approx(25_000, rel=1e-3)
    assert model.exposure_s[1, 3] == pytest.approx(5e5, rel=1e-3)


def test_buckets_differ_by_turn_and_sizes():
    sizes = list(itertools.product((1, 100, 400, 1500, 5000, 12_000), (1, 250)))
    found = [
        bucket_of(is_first=first, prompt_tokens=prompt, output_tokens=output)
        for first in (True, False)
        for prompt, output in sizes
    ]
    assert sorted(found) == list(range(1, NUM_BUCKETS))


def open_log():
    return ReturnLog(ReturnModel())


def test_returns_count_once_and_idle_ones_count_as_not_returned():
    log = open_log()
    for i in range(200):
        log.left(str(i), 1, 0.0)
    for i in range(50):
        log.returned(str(i), 10.0)
    log.returned("0", 11.0)  # it is running, or was never seen to leave
    assert log.model.returns.sum() == 50 and log.num_returns == 50 and len(log) == 150
    assert log.model.exposure_s.sum() == pytest.approx(50 * 10)
    assert log.open_exposure_s(20.0).sum() == pytest.approx(150 * 20)
    log.ended("60", 30.0)
    assert log.model.returns.sum() == 50 and log.model.exposure_s.sum() == pytest.approx(500 + 30)


def test_rows_are_reused():
    log = open_log()
    for i in range(1000):
        log.left("a", 1, float(i))
        log.left("b", 2, float(i))
        log.returned("a", i + 0.5)
        log.ended("b", i + 0.5)
    assert len(log) == 0 and len(log._ids) <= 2


def test_conversations_that_never_return_are_dropped():
    """The log has at most twice as many rows as conversations that may return, even if none returns."""
    log, gap_s = open_log(), 100.0
    for i in range(5000):
        log.left(str(i), 1, i * gap_s)
    assert len(log) <= 2 * HORIZON_S / gap_s + 64 and len(log._since_s) <= 4 * HORIZON_S / gap_s
    assert log.model.returns.sum() == 0


def test_a_conversation_that_was_idle_too_long_has_left():
    log = open_log()
    log.left("a", 1, 0.0)
    log.fit(HORIZON_S + 5)
    assert len(log) == 0 and log.model.exposure_s.sum() == pytest.approx(HORIZON_S)
    log.returned("a", HORIZON_S + 6)
    assert log.model.returns.sum() == 0


def learned_state():
    rng = np.random.default_rng(0)
    shape = NUM_BUCKETS, NUM_BINS
    losses = PolicyLosses(
        (1.0, 2.5, 0.5), ((1.0, 0.0, 0.0), (0.0, 3.0, 0.0), (0.0, 0.0, 1.0)), (3e4, 0.5, 9.0)
    )
    return LearnedState(rng.integers(0, 9, shape).astype(float), rng.random(shape) * 1e3, "returns", losses)


def test_learned_state_survives_serialization():
    before = learned_state()
    after = LearnedState.from_dict(json.loads(json.dumps(before.to_dict())))
    np.testing.assert_array_equal(after.returns, before.returns)
    np.testing.assert_allclose(after.exposure_s, before.exposure_s, atol=1e-6)
    assert (after.selected, after.losses) == (before.selected, before.losses)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": "another"}, "experience.format"),
        ({"followed": "conversation"}, "experience.followed"),
        ({"returns": [[1.0, 2.0], [3.0]]}, "experience.returns"),
        ({"returns": [[math.nan] * NUM_BINS] * NUM_BUCKETS}, "experience.returns"),
        ({"exposure_s": [[-1.0] * NUM_BINS] * NUM_BUCKETS}, "experience.exposure_s"),
        ({"lost_s": {"retention": 1.0}}, "experience.lost_s"),
        ({"lost_s": None}, "experience.lost_s"),
        ({"losses_counted_for": None}, "experience.losses_counted_for"),
        ({"losses_counted_for": ["x"]}, "experience.losses_counted_for"),
        ({"loss_products": "no"}, "experience.loss_products"),
    ],
)
def test_an_invalid_document_is_refused_by_field(change, field):
    with pytest.raises(ConfigError) as caught:
        LearnedState.from_dict(learned_state().to_dict() | change)
    assert caught.value.field == field


@pytest.mark.parametrize("document", [None, [], "text", {}, 3])
def test_a_value_that_is_not_a_document_is_refused(document):
    with pytest.raises(ConfigError):
        LearnedState.from_dict(document)


def test_learned_states_of_several_replicas_add_up():
    one = learned_state()
    both = LearnedState.merged([one, one])
    assert both.num_returns == 2 * one.num_returns and both.selected == "returns"


def test_the_common_start_counts_once():
    given = learned_state()
    begun = [LearnedState(given.returns + i, given.exposure_s + i, "lru", given.losses) for i in range(3)]
    found = LearnedState.merged(begun, given)
    np.testing.assert_allclose(found.returns, given.returns + 3)
    np.testing.assert_allclose(found.exposure_s, given.exposure_s + 3)
