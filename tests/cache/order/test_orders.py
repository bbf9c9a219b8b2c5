"""Values, texts and costs of the orders, by number; and the fields of a learned-state document."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pensieve_jax import ConfigError
from pensieve_jax.cache import AnalyticCostModel, EvictionClass, LearnedState, make_policy
from pensieve_jax.cache.order.policies import (
    EvictionCandidates,
    EvictionPolicy,
    LearnedPolicy,
    RecencyPolicy,
    RetentionPolicy,
    ReturnsPolicy,
    orders_of,
)
from pensieve_jax.cache.order.policy_selector import PolicyLosses
from pensieve_jax.cache.order.returns import EDGES_S, NUM_BINS, NUM_BUCKETS, ReturnModel, bin_of
from pensieve_jax.cache.order.victims import VictimOrder
from tests.cache.helpers import CHUNK, Cache, habits

COSTS = AnalyticCostModel(CHUNK, num_weights=1e3, attention_width=1e3)


class Active:
    """A conversation with a given time of last activity."""

    def __init__(self, last_active_s: float, bucket: int = 0) -> None:
        self.last_active_s, self.bucket = last_active_s, bucket


def candidates(*rows: tuple[float, int, int]) -> EvictionCandidates:
    last_active_s, buckets, chunks = zip(*rows, strict=True)
    return EvictionCandidates(np.array(last_active_s), np.array(buckets), np.array(chunks))


# Costs.


@pytest.mark.parametrize(
    ("context_len", "cost_s"),
    [
        # 32 tokens * (2 * 12e9 + 4 * 204800 * context) / 4e14, for 40 layers of 40 heads of 128
        (32, 32 * (24e9 + 819_200 * 32) / 4e14),
        (4096, 32 * 27_355_443_200 / 4e14),
        (16_384, 32 * 37_421_772_800 / 4e14),
    ],
)
def test_the_default_cost_is_two_operations_per_weight_and_four_per_unit_of_attention(context_len, cost_s):
    cost = AnalyticCostModel(32, num_weights=12e9, attention_width=40 * 40 * 128)
    assert cost.chunk_cost_s(context_len) == pytest.approx(cost_s, rel=1e-12)


def test_the_default_cost_by_hand():
    """One token, one weight, width one, context one: 2 + 4 operations, at 4e14 per second."""
    windowed = AnalyticCostModel(1, 0, 1, flop_per_s=1.0, windows=((8, 2), (100, 3)))
    assert [windowed.chunk_cost_s(length) for length in (5, 8, 50, 200)] == [120, 192, 864, 2064]
    assert AnalyticCostModel(1, 1, 1).chunk_cost_s(1) == pytest.approx(1.5e-14)
    assert AnalyticCostModel(1, 1, 0, flop_per_s=1.0).chunk_cost_s(5) == 2
    assert AnalyticCostModel(1, 0, 1, flop_per_s=1.0).chunk_cost_s(5) == 20


# Values.


def test_retention_divides_the_cost_up_to_a_chunks_end_by_idle_time():
    policy = RetentionPolicy(COSTS, CHUNK)
    for index in (0, 3):
        cost_s = COSTS.chunk_cost_s((index + 1) * CHUNK)
        assert policy.worth(Active(90.0), index, 100.0) == cost_s / 10
        assert policy.worth(Active(100.0), index, 100.0) == cost_s / 1e-3
        assert policy.worth(Active(200.0), index, 100.0) == cost_s / 1e-3
    assert policy.worths(candidates((90.0, 0, 3), (100.0, 0, 0)), 100.0).tolist() == [
        COSTS.chunk_cost_s(4 * CHUNK) / 10,
        COSTS.chunk_cost_s(CHUNK) / 1e-3,
    ]
    assert policy.epoch(1.0) != policy.epoch(2.0) and policy.until_s(candidates((0.0, 0, 0)), 1.0) is None


def test_costs_of_many_reach_the_requested_length():
    policy = RetentionPolicy(COSTS, CHUNK)
    for index in (0, 1, 2, 3, 10, 21, 20):
        expected = COSTS.chunk_cost_s((index + 1) * CHUNK) / 10
        assert policy.worths(candidates((90.0, 0, index)), 100.0).tolist() == [expected]


def test_recency_is_one_over_idle_time():
    policy = RecencyPolicy()
    assert [policy.worth(Active(at_s), 7, 100.0) for at_s in (90.0, 100.0, 101.0)] == [0.1, 1e3, 1e3]
    assert policy.worths(candidates((90.0, 0, 7), (101.0, 0, 0)), 100.0).tolist() == [0.1, 1e3]
    assert policy.epoch(1.0) != policy.epoch(2.0)


@pytest.mark.parametrize("name", ["lru", "conversation", "trailing"])
def test_the_least_recent_have_their_time_as_value(name):
    policy = make_policy(name, COSTS, CHUNK)
    assert policy.worth(Active(90.0), 7, 100.0) == 90.0 and policy.epoch(1.0) == policy.epoch(2.0)
    assert policy.worths(candidates((90.0, 0, 7)), 100.0).tolist() == [90.0]


def test_returns_multiply_the_index_by_the_cost_until_the_bin_ends():
    policy = ReturnsPolicy(habits(0), COSTS, CHUNK)
    expected = policy.model.index(5, bin_of(90.0, 100.0)) * COSTS.chunk_cost_s(3 * CHUNK)
    assert policy.worth(Active(90.0, 5), 2, 100.0) == expected
    assert policy.worths(candidates((90.0, 5, 2)), 100.0).tolist() == [expected]
    (end_s,) = policy.until_s(candidates((90.0, 5, 2)), 100.0).tolist()
    assert end_s == 90.0 + EDGES_S[bin_of(90.0, 100.0) + 1]
    before = policy.epoch(1.0)
    assert policy.epoch(2.0) == before
    policy.model.fit(np.zeros((NUM_BUCKETS, NUM_BINS)))
    fitted = policy.epoch(1.0)
    policy.use(ReturnModel())
    assert len({before, fitted, policy.epoch(1.0)}) == 3
    policy.use(ReturnModel())
    policy.use(ReturnModel())
    assert policy.epoch(1.0)[0] == 4, "a model with as many fits is another one"


def test_without_a_vectorized_method_each_value_is_asked_for():
    """An order without columns is asked for each value; a row without a chunk has the value infinity."""

    class Plain(RetentionPolicy):
        worths = EvictionPolicy.worths

    policy = Plain(COSTS, CHUNK)
    found = policy.worths(candidates((90.0, 0, 0), (80.0, 0, -1), (80.0, 0, 1)), 100.0)
    first, last = policy.worth(Active(90.0), 0, 100.0), policy.worth(Active(80.0), 1, 100.0)
    assert found.tolist() == [first, math.inf, last]


def test_the_learned_order_equals_the_followed_one():
    policy = LearnedPolicy(COSTS, CHUNK)
    assert list(orders_of(ReturnsPolicy(ReturnModel(), COSTS, CHUNK), COSTS, CHUNK)) == list(policy.orders)
    assert policy.selected == "retention" and policy.current is policy.orders["retention"]
    policy.select("lru")
    assert policy.worth(Active(90.0), 7, 100.0) == 0.1
    model = habits(1)
    policy.use(model)
    policy.select("returns")
    assert policy.model is policy.current.model is model


@pytest.mark.parametrize(
    ("policy", "worths", "words"),
    [
        ("retention", [(0.25, 1.0), (0.5, 2.0)], "worth 0.25 to 0.5 s of recomputation per second idle"),
        ("retention", [(0.25, 1.0), (0.25, 2.0)], "worth 0.25 s of recomputation per second idle"),
        ("lru", [(90.0, 100.0), (95.0, 100.0)], "idle for 5.0 to 10.0 s"),
        ("learned", [(0.25, 1.0)], "worth 0.25 in the order that was followed"),
    ],
)
def test_values_as_text(policy, worths, words):
    assert make_policy(policy, COSTS, CHUNK).describe(worths) == words


def test_a_recency_as_text_is_not_a_time():
    assert RecencyPolicy().describe([(0.5, 1.0), (2.0, 1.0)]) == "worth 0.5 to 2"


# The order of victims.


def order_over(cache: Cache, *sequences, policy=None) -> VictimOrder:
    order = VictimOrder(policy or cache.policy, EvictionClass.DIRTY, dict.fromkeys(sequences))
    order.begin(cache.clock.now())
    return order


def test_a_victim_that_was_not_evicted_is_named_again():
    cache = Cache(20, policy="lru")
    old, _ = cache.idle("old", 2 * CHUNK, 9.0), cache.idle("young", CHUNK, 1.0)
    order = order_over(cache, *cache.manager._store)
    assert order.peek() == order.peek() == (old, (0,), 91.0)


def test_there_is_no_victim_without_a_candidate():
    cache = Cache(20)
    assert order_over(cache).peek() is None
    runs = cache.running("runs", CHUNK)
    waits = cache.queued("waits", cache.idle("waits", CHUNK))
    assert order_over(cache, runs, waits, cache.manager.open("empty")).peek() is None


def test_an_order_that_never_had_a_candidate_can_be_asked_again():
    order = order_over(Cache(20))
    assert order.peek() is None and order.peek() is None


def test_each_value_is_computed_once_in_a_pass():
    """A new time outdates all values; a sequence that changed as well is not valued twice."""

    class Counting(RetentionPolicy):
        def worths(self, candidates, now_s):
            num_valued.append(len(candidates.chunks))
            return super().worths(candidates, now_s)

    num_valued: list[int] = []
    cache = Cache(20)
    made = [cache.idle(str(i), CHUNK, 9.0 - i) for i in range(3)]
    noted = dict.fromkeys(made)
    order = VictimOrder(Counting(COSTS, CHUNK), EvictionClass.DIRTY, noted)
    order.begin(100.0)
    assert order.peek().sequence is made[0] and num_valued == [3]
    cache.manager._store.set_active(made[0], 99.0)
    noted[made[0]] = None
    order.begin(110.0)
    assert order.peek().sequence is made[1] and num_valued == [3, 3]


@pytest.mark.parametrize("num_sequences", [63, 64, 65, 66, 130, 300])
def test_many_sequences_are_evicted_in_order(num_sequences):
    """There are more than the front holds, with ties across its end."""
    cache = Cache(num_sequences, policy="lru")
    made = [cache.running(str(i), CHUNK) for i in range(num_sequences)]
    for number, sequence in enumerate(made):
        cache.manager.release(sequence)
        cache.manager._store.set_active(sequence, float(number * 7 % num_sequences // 3))
    order, found = order_over(cache, *made), []
    while (victim := order.peek()) is not None:
        found.append(victim.sequence)
        cache.queued("taken", victim.sequence)
    assert found == sorted(made, key=lambda s: s.last_active_s) and len(found) == num_sequences


def test_rows_are_found_again_after_others_were_forgotten():
    """To make room for more rows, the rows of forgotten conversations are removed."""
    cache = Cache(200, policy="lru")
    made = [cache.idle(str(i), CHUNK, 90.0 - i / 2) for i in range(64)]
    noted = dict.fromkeys(made)
    order = VictimOrder(cache.policy, EvictionClass.DIRTY, noted)
    order.begin(100.0)
    assert order.peek().sequence is made[0]
    for sequence in made[:32]:
        cache.queued("gone", sequence)
    more = [cache.idle(f"new {i}", CHUNK, 1.0) for i in range(40)]
    noted.update(dict.fromkeys(more))
    assert order.peek().sequence is made[32]
    cache.manager._store.set_active(made[32], 99.5)
    noted[made[32]] = None
    found = []
    while (victim := order.peek()) is not None:
        found.append(victim.sequence)
        cache.queued("taken", victim.sequence)
    assert found == [*made[33:], *more, made[32]]


def test_a_conversation_that_became_idle_again_ranks_by_its_new_time():
    cache = Cache(20, policy="lru")
    one, two = cache.idle("one", CHUNK, 5.0), cache.idle("two", CHUNK, 5.0)
    noted = {one: None, two: None}
    order = VictimOrder(cache.policy, EvictionClass.DIRTY, noted)
    order.begin(100.0)
    assert order.peek().sequence is one
    cache.queued("one", one)
    cache.manager.release(one)
    cache.manager._store.set_active(one, 95.0)
    noted[one] = None
    assert order.peek().sequence is two and not noted
    cache.queued("two", two)
    assert order.peek().sequence is one
    cache.queued("one", one)
    assert order.peek() is None


def test_a_bin_that_ends_changes_the_order():
    """In `returns`, the index of the first conversation falls when its idle time leaves its bin."""
    cache = Cache(20, policy="learned")
    one, two = cache.idle("one", CHUNK, 0.0), cache.idle("two", CHUNK, 0.0)
    one.bucket, two.bucket = 1, 2
    model = ReturnModel()
    for _ in range(100):
        model.close(1, 0.5, returned=True)
        model.close(2, 0.7, returned=True)
        model.close(1, 50.0, returned=False)
        model.close(2, 1.5, returned=True)
    model.fit(np.zeros((NUM_BUCKETS, NUM_BINS)))
    policy = ReturnsPolicy(model, COSTS, CHUNK)
    order = order_over(cache, one, two, policy=policy)
    for after_s in (0.0, 1.2, 3.0, 60.0):
        order.begin(100.0 + after_s)
        worths = {s: policy.worth(s, 0, 100.0 + after_s) for s in (one, two)}
        victim = order.peek()
        assert victim.worth == worths[victim.sequence] == min(worths.values())


# Learned state.


def document() -> dict:
    shape = NUM_BUCKETS, NUM_BINS
    losses = PolicyLosses((1.0, 2.0, 3.0), ((1.0,) * 3,) * 3, (5.0, 6.0))
    return LearnedState(np.full(shape, 2.0), np.full(shape, 0.12345678), "lru", losses).to_dict()


def test_a_document_has_microsecond_resolution():
    assert document()["exposure_s"][0][0] == 0.123457 and document()["returns"][3][4] == 2.0
    assert document()["lost_s"] == {"retention": 1.0, "lru": 2.0, "returns": 3.0}
    assert document()["format"] == "pensieve experience, version 1"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("returns", np.zeros((NUM_BUCKETS, NUM_BINS - 1)).tolist()),
        ("exposure_s", [[math.inf] * NUM_BINS] * NUM_BUCKETS),
        ("loss_products", [[1.0] * 3] * 2),
        ("loss_products", [[1.0, 1.0, -0.1]] * 3),
    ],
)
def test_numbers_of_another_shape_or_sign_are_refused(field, values):
    with pytest.raises(ConfigError, match=field):
        LearnedState.from_dict(document() | {field: values})


def test_zeros_are_accepted():
    shape = NUM_BUCKETS, NUM_BINS
    found = LearnedState.from_dict(
        document() | {"returns": np.zeros(shape).tolist(), "losses_counted_for": []}
    )
    assert found.num_returns == 0 and found.losses.counted_for == ()


def test_merging_subtracts_the_common_start_without_negative_results():
    shape, losses = (NUM_BUCKETS, NUM_BINS), PolicyLosses((0.0,) * 3, ((0.0,) * 3,) * 3)
    given = LearnedState(np.full(shape, 4.0), np.full(shape, 8.0), "lru", losses)
    ones = [
        LearnedState(np.full(shape, returns), np.full(shape, 2 * returns), followed, losses)
        for returns, followed in ((1.0, "returns"), (2.0, "lru"), (7.0, "lru"))
    ]
    both = LearnedState.merged(ones, given)
    assert both.selected == "returns" and both.returns[0, 0] == 10 - 8 and both.exposure_s[0, 0] == 20 - 16
    few = LearnedState.merged(ones[:2], given)
    assert few.returns[0, 0] == 0 and few.exposure_s[0, 0] == 0
    alone = LearnedState.merged(ones[2:], given)
    assert alone.returns[0, 0] == 7 and alone.exposure_s[0, 0] == 14
