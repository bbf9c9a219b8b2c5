"""The contract of eviction policies, the order that each guarantees, and the cost model behind one."""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax.cache import AnalyticCostModel, DropReason, EvictionClass, Role, VictimOrder, make_policy
from pensieve_jax.cache.order.policies import EvictionCandidates, RetentionPolicy
from pensieve_jax.cache.order.returns import EDGES_S, NUM_BUCKETS
from pensieve_jax.config import POLICIES
from tests.cache.helpers import CHUNK, Cache, habits, resident


class Active(NamedTuple):
    """Times of activity of a sequence, and its bucket."""

    last_active_s: float
    bucket: int


def cache_with(policy, sizes, holes=()):
    """Return a cache of idle sequences (chunks, idle seconds); `holes` are (sequence, chunk) to drop."""
    cache = Cache(200, policy=policy)
    sequences = [cache.idle(f"s{i}", size * CHUNK, idle_s) for i, (size, idle_s) in enumerate(sizes)]
    for i, chunk in holes:
        sequence = sequences[i % len(sequences)]
        if chunk < len(sequence.chunks) - 1 and chunk in resident(sequence):
            cache.drop(sequence, chunk)
    return cache, sequences


def victims_of(cache, sequences, eviction_class=EvictionClass.DIRTY):
    """Return (sequence, chunks) in eviction order; each group is dropped before the next is asked for."""
    order = VictimOrder(cache.policy, eviction_class, dict.fromkeys(sequences))
    while (victim := peek(order, cache)) is not None:
        sequence, group, worth = victim
        assert worth == cache.policy.worth(sequence, group[0], cache.clock.now())
        yield sequence, group
        for chunk in group:
            cache.manager._store.drop(sequence, chunk, DropReason.NO_HOST_MEMORY, None)
        cache.manager._store.trim(sequence)
        cache.check()


def peek(order, cache):
    """Return the next victim at the current time."""
    order.begin(cache.clock.now())
    return order.peek()


def order_of(cache, sequences, eviction_class=EvictionClass.DIRTY):
    """Return [(sequence's number, chunk)] in drop order, until none is left."""
    victims = victims_of(cache, sequences, eviction_class)
    return [(sequences.index(sequence), chunk) for sequence, group in victims for chunk in group]


sizes_strategy = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 50)), min_size=1, max_size=6)
holes_strategy = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)


@pytest.mark.parametrize("policy", POLICIES)
@given(sizes=sizes_strategy, holes=holes_strategy)
def test_every_resident_chunk_is_a_victim_exactly_once(policy, sizes, holes):
    cache, sequences = cache_with(policy, sizes, holes)
    expected = [(i, chunk) for i, sequence in enumerate(sequences) for chunk in resident(sequence)]
    order = order_of(cache, sequences)
    assert sorted(order) == expected and cache.pool.num_free == 200
    assert order == order_of(*cache_with(policy, sizes, holes)), "the order is not reproducible"


@pytest.mark.parametrize("policy", POLICIES)
@given(sizes=sizes_strategy, holes=holes_strategy)
def test_order_within_a_conversation(policy, sizes, holes):
    """The leading end goes first, except in `trailing`, which starts at the tail."""
    cache, sequences = cache_with(policy, sizes, holes)
    all_resident = [resident(sequence) for sequence in sequences]
    order = order_of(cache, sequences)
    for i, expected in enumerate(all_resident):
        chunks = [chunk for owner, chunk in order if owner == i]
        assert chunks == (expected[::-1] if policy == "trailing" else expected)


@pytest.mark.parametrize("policy", ["lru", "conversation", "trailing"])
@given(sizes=sizes_strategy)
def test_the_longest_idle_go_first_if_cost_does_not_matter(policy, sizes):
    """Conversations go one after the other; tied ones go together, in any chunk order."""
    cache, sequences = cache_with(policy, sizes)
    last_active = [sequences[i].last_active_s for i, _ in order_of(cache, sequences)]
    assert last_active == sorted(last_active)


@given(sizes=sizes_strategy, holes=holes_strategy)
def test_retention_drops_by_cost_over_idle_time(sizes, holes):
    """Values rise along the order, since costs never fall towards the tail; T is at least a millisecond."""
    cache, sequences = cache_with("retention", sizes, holes)
    cost = AnalyticCostModel(CHUNK, num_weights=1e3, attention_width=1e3)
    values = [
        cost.chunk_cost_s((chunk + 1) * CHUNK) / max(cache.clock.now() - sequences[i].last_active_s, 1e-3)
        for i, chunk in order_of(cache, sequences)
    ]
    assert values == sorted(values)


def test_retention_evicts_cheap_chunks_of_many_before_expensive_ones_of_one():
    cache, sequences = cache_with("retention", [(3, 10.0), (3, 11.0)])
    assert order_of(cache, sequences) == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2)]
    cache, sequences = cache_with("retention", [(3, 1.0), (3, 1000.0)])
    assert order_of(cache, sequences) == [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]


def test_conversation_evicts_whole_histories():
    cache, sequences = cache_with("conversation", [(3, 1.0), (2, 5.0)])
    groups = [(sequence.sequence_id, group) for sequence, group in victims_of(cache, sequences)]
    assert groups == [("s1", (0, 1)), ("s0", (0, 1, 2))]


@pytest.mark.parametrize("policy", POLICIES)
def test_ties_go_to_the_sequence_given_first(policy):
    cache, sequences = cache_with(policy, [(2, 5.0), (2, 5.0), (2, 5.0)])
    first_of_each = dict.fromkeys(i for i, _ in order_of(cache, sequences))
    assert list(first_of_each) == [0, 1, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_dropped_by_others_do_not_break_the_order(policy):
    """After a truncation between two victims, the rest still comes, once."""
    cache, (one, two) = cache_with(policy, [(4, 3.0), (4, 3.0)])
    victims = victims_of(cache, [one, two])
    next(victims)
    cache.manager.truncate(two, CHUNK)
    order = [(sequence.sequence_id, chunk) for sequence, group in victims for chunk in group]
    assert len(set(order)) == len(order) and not resident(one) and not resident(two)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_that_was_pinned_since_is_skipped(policy):
    """It does not stop the others from being evicted."""
    cache, (one, two) = cache_with(policy, [(3, 9.0), (3, 1.0)])
    order = VictimOrder(cache.policy, EvictionClass.DIRTY, {one: None, two: None})
    assert peek(order, cache).sequence is one
    cache.queued("s0", one)
    assert peek(order, cache).sequence is two


@pytest.mark.parametrize("policy", POLICIES)
@given(sizes=sizes_strategy, changes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=40))
def test_the_order_stays_right_while_everything_changes(policy, sizes, changes):
    """Time passes, sequences are evicted, pinned, cut or return: the order equals an exhaustive search."""
    cache, sequences = cache_with(policy, sizes)
    store, noted = cache.manager._store, dict.fromkeys(sequences)
    order = VictimOrder(cache.policy, EvictionClass.DIRTY, noted)
    order.begin(cache.clock.now())
    for number, change in changes:
        sequence = sequences[number % len(sequences)]
        if change == 0:
            cache.clock.advance(7.0)
            order.begin(cache.clock.now())
        elif change == 1 and sequence.role is Role.IDLE:
            cache.queued(sequence.sequence_id, sequence)
        elif change == 2 and sequence.role is Role.QUEUED:
            cache.manager.release(sequence)
        elif change == 3 and sequence.role is Role.IDLE:
            cache.manager.truncate(sequence, max(sequence.num_kv_tokens - CHUNK, 0))
        elif change == 4 and sequence.role is Role.IDLE:
            cache.manager.touch(sequence)
        elif change == 5 and sequence.role is Role.IDLE:
            cache.running(sequence.sequence_id, 5 * CHUNK, sequence)  # its leading chunks are back
            cache.manager.release(sequence)
        else:
            victim = order.peek()
            for chunk in () if victim is None else victim.indices:
                store.drop(victim.sequence, chunk, DropReason.NO_HOST_MEMORY, None)
            if victim is not None:
                store.trim(victim.sequence)
        noted.update(store.changed[EvictionClass.DIRTY])
        store.changed[EvictionClass.DIRTY].clear()  # sequences without a notification must not need one
        victim = order.peek()
        now_s, expected = cache.clock.now(), []
        for one in sequences:
            if one.role is Role.IDLE and one.num_by_class[EvictionClass.DIRTY]:
                index = cache.policy.chunk(one, EvictionClass.DIRTY)
                expected.append((cache.policy.worth(one, index, now_s), one.role_number, one))
        found = None if victim is None else (victim.worth, victim.sequence.role_number, victim.sequence)
        assert found == min(expected, default=None)


def test_a_sequence_that_left_does_not_hide_a_tie():
    """All have equal values; behind one that was pinned since is the one that became idle first."""
    cache, (first, second, third) = cache_with("retention", [(1, 1.0), (2, 1.0), (1, 1.0)], holes=[(1, 0)])
    policy = RetentionPolicy(AnalyticCostModel(CHUNK, num_weights=1e3, attention_width=0.0), CHUNK)
    for sequence in (third, second, first):  # `first` ranks behind `third`, in the group of chunk 0
        cache.clock.advance(1e-5)
        cache.manager.touch(sequence)
    order = VictimOrder(policy, EvictionClass.DIRTY, {first: None, second: None, third: None})
    peek(order, cache)
    cache.queued("s2", third)
    cache.clock.advance(1e-5)
    assert peek(order, cache).sequence is first


def test_rows_of_sequences_that_left_do_not_accumulate():
    """Others keep coming and leaving behind a conversation with the lowest value."""
    cache, (one, two) = cache_with("lru", [(1, 50.0), (1, 1.0)])
    noted = {one: None, two: None}
    order = VictimOrder(cache.policy, EvictionClass.DIRTY, noted)
    for _ in range(1000):
        cache.clock.advance(1.0)
        cache.queued("s1", two)
        cache.manager.release(two)
        noted[two] = None
        assert peek(order, cache).sequence is one
    assert len(order._sequences) < 100 and len(order._worths) < 100


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_many_come_and_go(seed):
    """There are more than the initial rows; empty sequences and ones that left are forgotten on the way."""
    print("seed", seed)
    rng, cache = random.Random(seed), Cache(2000)
    store, held = cache.manager._store, []
    noted = {}
    order = VictimOrder(cache.policy, EvictionClass.DIRTY, noted)
    for number in range(400):
        cache.clock.advance(rng.choice((0.0, 1.0)))
        held.append(cache.idle(f"s{number}", rng.randint(1, 3) * CHUNK))
        if rng.random() < 0.3:
            back = held.pop(rng.randrange(len(held)))
            cache.queued(back.sequence_id, back)
        noted.update(store.changed[EvictionClass.DIRTY])
        store.changed[EvictionClass.DIRTY].clear()  # sequences without a notification must not need one
        now_s = cache.clock.now()
        order.begin(now_s)
        for _ in range(rng.choice((0, 1, 2, 90)) if number % 50 == 49 else rng.randrange(2)):
            there = [one for one in store.members[Role.IDLE] if one.num_by_class[EvictionClass.DIRTY]]
            victim = order.peek()
            if not there:
                assert victim is None
                break
            worths = [
                (cache.policy.worth(one, one.first_of(EvictionClass.DIRTY), now_s), i)
                for i, one in enumerate(there)
            ]
            assert (victim.worth, there.index(victim.sequence)) == min(worths)
            store.drop(victim.sequence, victim.indices[0], DropReason.NO_HOST_MEMORY, None)
            store.trim(victim.sequence)


ORDERS = {name: make_policy(name, AnalyticCostModel(CHUNK, 1e3, 1e3), CHUNK) for name in POLICIES}
ORDERS |= {f"learned, {name}": order for name, order in ORDERS["learned"].orders.items()}


@pytest.mark.parametrize("name", ORDERS)
@given(
    seed=st.integers(0, 1000),
    offers=st.lists(
        st.tuples(st.floats(0.0, 1e9), st.integers(0, NUM_BUCKETS - 1), st.integers(-1, 5000)), min_size=1
    ),
    idle_s=st.one_of(st.sampled_from(EDGES_S), st.floats(-1.0, 3e4)),
)
def test_vectorized_values_equal_single_ones(name, seed, offers, idle_s):
    """They are bit-identical, also if idle time is at an edge, and until the returned time."""
    order = ORDERS[name]
    if name == "learned, returns":
        order.use(habits(seed))
    columns = [np.array(column, kind) for column, kind in zip(zip(*offers, strict=True), "dqq", strict=True)]
    now_s = offers[0][0] + idle_s
    worths = order.worths(EvictionCandidates(*columns), now_s)
    ends_s = order.until_s(EvictionCandidates(*columns), now_s)
    if ends_s is None:
        ends_s = [math.inf] * len(offers)
    for (last_active_s, bucket, chunk), worth, end_s in zip(offers, worths.tolist(), ends_s, strict=True):
        if chunk >= 0:
            sequence = Active(last_active_s, bucket)
            assert worth == order.worth(sequence, chunk, now_s)
            assert end_s > now_s
            before_s = np.nextafter(end_s, 0.0)
            if order.epoch(before_s) == order.epoch(now_s):
                assert worth == order.worth(sequence, chunk, before_s)


@pytest.mark.parametrize("name", ORDERS)
def test_the_value_never_falls_from_one_chunk_to_the_next(name):
    """A copy ahead of need takes one chunk at a time, also from an order that evicts several together."""
    order, (cache, (sequence,)) = ORDERS[name], cache_with("retention", [(6, 10.0)])
    values = []
    while sequence.num_by_class[EvictionClass.DIRTY]:
        index = order.chunk(sequence, EvictionClass.DIRTY)
        values.append(order.worth(sequence, index, cache.clock.now()))
        cache.manager._store.drop(sequence, index, DropReason.NO_HOST_MEMORY, None)
        cache.manager._store.trim(sequence)
    assert len(values) == 6 and values == sorted(values)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_eviction_class_has_its_own_order(policy):
    """Chunks 1 and 2 are on the CPU, 0 and 3 on the GPU."""
    cache = Cache(20, 20, policy=policy)
    sequence = cache.on_cpu("a", 4 * CHUNK, but=[0, 3])
    on_cpu = order_of(cache, [sequence], EvictionClass.HOST)
    assert on_cpu == ([(0, 2), (0, 1)] if policy == "trailing" else [(0, 1), (0, 2)])
    assert resident(sequence) == [0, 3] and order_of(cache, [sequence], EvictionClass.CLEAN) == []


def test_an_unknown_policy_is_an_error():
    with pytest.raises(KeyError):
        make_policy("fifo", AnalyticCostModel(CHUNK, 1.0, 1.0), CHUNK)


@given(
    num_weights=st.floats(0, 1e11),
    attention_width=st.floats(0, 1e7),
    lens=st.lists(st.integers(1, 10**6), min_size=2),
)
def test_cost_never_decreases_with_context(num_weights, attention_width, lens):
    cost = AnalyticCostModel(32, num_weights, attention_width)
    costs = [cost.chunk_cost_s(context_len) for context_len in sorted(lens)]
    assert all(a <= b for a, b in itertools.pairwise(costs)) and costs[0] >= 0


def test_cost_counts_weights_and_attention():
    """32 tokens, 10 weights, width 3, context 64: 32 * (20 + 4 * 3 * 64) operations."""
    assert AnalyticCostModel(32, 10, 3, flop_per_s=1.0).chunk_cost_s(64) == 32 * (20 + 768)
