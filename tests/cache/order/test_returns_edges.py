"""Returns: edges of buckets and bins, the weight of evidence, and when the model is refitted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pensieve_jax.cache.order.return_log import ReturnLog
from pensieve_jax.cache.order.returns import (
    EDGES_S,
    ENDS_S,
    HORIZON_S,
    NUM_BINS,
    NUM_BUCKETS,
    UNKNOWN,
    ReturnModel,
    bin_of,
    bins_of,
    bucket_of,
    exposure_of,
    hazards_of,
)

ZEROS = np.zeros((NUM_BUCKETS, NUM_BINS))


def test_bins_begin_at_a_second_and_end_at_the_horizon():
    assert (NUM_BINS, EDGES_S[:2], HORIZON_S, ENDS_S[-1]) == (28, (0.0, 1.0), 20_000.0, math.inf)
    ratio = 20_000.0 ** (1 / 27)
    assert EDGES_S[2] == pytest.approx(ratio) and EDGES_S[-1] == pytest.approx(20_000.0 / ratio)
    assert ENDS_S[:-1].tolist() == list(EDGES_S[1:])


def test_buckets_are_numbered_by_turn_then_prompt_then_output():
    assert (NUM_BUCKETS, UNKNOWN) == (25, 0)
    expected = 1
    for is_first in (True, False):
        for prompt_tokens in (99, 399, 1499, 4999, 11_999, 12_000):
            for output_tokens in (249, 250):
                bucket = bucket_of(
                    is_first=is_first, prompt_tokens=prompt_tokens, output_tokens=output_tokens
                )
                assert bucket == expected
                expected += 1


@pytest.mark.parametrize("prompt_tokens", [100, 400, 1500, 5000, 12_000])
def test_a_bucket_of_prompts_begins_at_its_size(prompt_tokens):
    below, at = (
        bucket_of(is_first=True, prompt_tokens=size, output_tokens=0)
        for size in (prompt_tokens - 1, prompt_tokens)
    )
    assert at == below + 2


@pytest.mark.parametrize("number", [0, 1, 5, NUM_BINS - 1])
@pytest.mark.parametrize("last_active_s", [0.0, 0.1, 1e9 + 0.3])
def test_a_bin_includes_its_beginning_and_excludes_its_end(number, last_active_s):
    begin_s = last_active_s + EDGES_S[number]
    before_s = np.nextafter(begin_s, -math.inf).item()
    assert bin_of(last_active_s, begin_s) == number and bin_of(last_active_s, before_s) == max(number - 1, 0)
    active_s = np.array([last_active_s])
    assert bins_of(active_s, begin_s) == [number] and bins_of(active_s, before_s) == [max(number - 1, 0)]


def test_times_beyond_the_last_edge_are_in_the_last_bin_and_times_before_now_in_the_first():
    for now_s, number in ((1e6, NUM_BINS - 1), (-5.0, 0)):
        assert bin_of(0.0, now_s) == bins_of(np.zeros(1), now_s)[0] == number


# Counting.


def test_a_return_counts_in_the_bin_of_its_time():
    model = ReturnModel()
    for idle_s in (0.0, 0.99, 1.0, 15_000.0):
        model.close(3, idle_s, returned=True)
    assert model.returns[3, [0, 1, NUM_BINS - 1]].tolist() == [2, 1, 1] and model.returns.sum() == 4
    assert model.exposure_s[3, 0] == pytest.approx(2.99) and model.exposure_s.sum() == pytest.approx(
        15_001.99
    )


def test_a_conversation_that_is_idle_at_the_horizon_has_not_returned():
    model = ReturnModel()
    model.close(1, HORIZON_S, returned=True)
    model.close(1, 10.0, returned=False)
    assert model.returns.sum() == 0 and model.exposure_s.sum() == pytest.approx(HORIZON_S + 10)
    model.close(1, HORIZON_S - 1, returned=True)
    assert model.returns[1, NUM_BINS - 1] == 1


def test_counts_are_halved_above_fifty_thousand_returns():
    returns, exposure_s = ZEROS.copy(), ZEROS.copy()
    returns[1, 3], exposure_s[1, 3] = 49_999.0, 1e6
    model = ReturnModel(returns, exposure_s)
    model.close(1, 2.0, returned=True)
    assert model.returns.sum() == 50_000
    model.close(1, 2.0, returned=True)
    assert model.returns.sum() == 25_000.5 and model.exposure_s[1, 3] == pytest.approx(5e5, rel=1e-4)
    assert returns[1, 3] == 49_999, "what it began from is left alone"
    model.close(1, 2.0, returned=True)
    assert model.returns.sum() == 25_001.5


def test_fits_are_counted():
    model = ReturnModel()
    assert model.num_fits == 1
    model.fit(ZEROS)
    assert model.num_fits == 2


def test_vectorized_indices_equal_single_ones():
    model = ReturnModel()
    model.close(7, 30.0, returned=True)
    model.fit(ZEROS)
    buckets, bins = np.array([7, 7, 0]), np.array([0, 5, NUM_BINS - 1])
    expected = [model.index(*pair) for pair in zip(buckets.tolist(), bins.tolist(), strict=True)]
    assert model.indices(buckets, bins).tolist() == expected and len(set(expected)) == 3


def test_exposure_of_idle_conversations_counts_in_a_fit():
    model, other = ReturnModel(), ReturnModel()
    for one in (model, other):
        one.close(7, 30.0, returned=True)
    other.fit(exposure_of([7] * 9, np.full(9, 25.0)))
    model.fit(ZEROS)
    assert other.index(7, 5) < model.index(7, 5)


# Rates.

MIDDLES_S = np.array(
    [
        max(math.sqrt(max(left, 0.5) * right), 0.5)
        for left, right in zip(EDGES_S, (*EDGES_S[1:], HORIZON_S), strict=True)
    ]
)


def test_the_first_rate_is_a_tenth_of_one_over_idle_time():
    np.testing.assert_allclose(hazards_of(ZEROS, ZEROS)[4], 0.1 / MIDDLES_S)


def test_rates_are_shrunk_by_bin_and_then_by_bucket():
    """3 returns of bucket 2 in bin 5, in 100 seconds; bucket 8 spent 50 seconds there, without a return."""
    returns, exposure_s = ZEROS.copy(), ZEROS.copy()
    returns[2, 5], exposure_s[2, 5], exposure_s[8, 5] = 3.0, 100.0, 50.0
    rate = 3.0 / (150.0 / MIDDLES_S[5])
    of_all_turns = (3.0 + 3.0) / (150.0 + 3.0 * MIDDLES_S[5] / rate)
    hazards = hazards_of(returns, exposure_s)
    assert hazards[2, 5] == pytest.approx((3.0 + 0.7) / (100.0 + 0.7 / of_all_turns))
    assert hazards[8, 5] == pytest.approx(0.7 / (50.0 + 0.7 / of_all_turns))
    assert hazards[1, 5] == pytest.approx(of_all_turns)
    assert hazards[2, 6] == pytest.approx(rate / MIDDLES_S[6])


def test_a_rate_is_never_below_a_thousandth():
    returns, exposure_s = ZEROS.copy(), ZEROS.copy()
    returns[2, 5], exposure_s[2, 5] = 1.0, 1e9
    assert hazards_of(returns, exposure_s)[1, 6] == pytest.approx(1e-3 / MIDDLES_S[6])


@pytest.mark.parametrize(("num_returns", "spent_s"), [(0.0, 100.0), (3.0, 0.0)])
def test_without_returns_or_time_the_initial_rate_counts(num_returns, spent_s):
    returns, exposure_s = ZEROS.copy(), ZEROS.copy()
    returns[2, 5], exposure_s[2, 5] = num_returns, spent_s
    assert hazards_of(returns, exposure_s)[1, 6] == pytest.approx(0.1 / MIDDLES_S[6])


# The log.


def test_the_model_is_fitted_after_every_thirty_second_return():
    log = ReturnLog(ReturnModel())
    fits = []
    for i in range(64):
        log.left("a", 1, float(i))
        log.returned("a", i + 0.5)
        fits.append(log.model.num_fits)
    assert fits == [1] * 31 + [2] * 32 + [3] and log.num_returns == 64


def test_idle_time_is_observed_up_to_the_horizon_and_from_zero_on():
    log = ReturnLog(ReturnModel())
    log.left("late", 1, 0.0)
    log.returned("late", 2 * HORIZON_S)
    assert log.model.exposure_s.sum() == pytest.approx(HORIZON_S) and log.model.returns.sum() == 0
    log.left("early", 2, 50.0)
    assert not log.open_exposure_s(40.0).any()
    log.returned("early", 40.0)
    assert log.model.exposure_s[2].sum() == 0 and log.model.returns[2, 0] == 1


@pytest.mark.parametrize(("idle_s", "is_kept"), [(HORIZON_S - 1, True), (HORIZON_S, False)])
def test_a_fit_closes_conversations_at_the_horizon(idle_s, is_kept):
    log = ReturnLog(ReturnModel())
    log.left("gone", 1, 0.0)
    log.left("there", 1, 10.0)
    log.fit(idle_s)
    assert len(log) == 1 + is_kept and log.num_returns == 0


def test_a_conversation_that_leaves_again_is_idle_from_then_on():
    log = ReturnLog(ReturnModel())
    log.left("a", 1, 0.0)
    log.left("a", 4, 10.0)
    assert len(log) == 1
    open_s = log.open_exposure_s(15.0)
    assert open_s.sum() == open_s[4].sum() == pytest.approx(5.0)


def test_rows_grow_if_all_conversations_may_return():
    log = ReturnLog(ReturnModel())
    for i in range(200):
        log.left(str(i), 1, float(i))
    assert len(log) == 200 and log.open_exposure_s(200.0).sum() == pytest.approx(sum(range(1, 201)))
    log.ended("150", 200.0)
    log.left("new", 2, 200.0)
    assert len(log._ids) == 200 and log.open_exposure_s(203.0)[2].sum() == pytest.approx(3.0)
