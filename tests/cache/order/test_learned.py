"""The order `learned`: which order it follows, what its ghost caches keep, and how it leaves a bad order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax.cache import AnalyticCostModel, DropReason, EvictionClass, Role, VictimOrder
from pensieve_jax.cache.order.ghost_cache import GhostCache
from pensieve_jax.cache.order.policies import LearnedPolicy, RecencyPolicy, RetentionPolicy, ReturnsPolicy
from pensieve_jax.cache.order.policy_selector import BLOCK_TOKENS, PolicySelector
from pensieve_jax.cache.order.returns import NUM_BINS, NUM_BUCKETS, ReturnModel
from tests.cache.helpers import CHUNK, Cache, habits
from tests.cache.order.test_policies import cache_with, holes_strategy, order_of, peek, sizes_strategy

COSTS = AnalyticCostModel(CHUNK, num_weights=1e3, attention_width=1e3)
ORDERS = ("retention", "lru", "returns")


@given(sizes=sizes_strategy, holes=holes_strategy)
def test_with_nothing_learned_it_is_the_papers_order(sizes, holes):
    assert order_of(*cache_with("learned", sizes, holes)) == order_of(*cache_with("retention", sizes, holes))


@given(sizes=sizes_strategy, holes=holes_strategy)
def test_following_lru_it_is_lru(sizes, holes):
    cache, sequences = cache_with("learned", sizes, holes)
    cache.policy.select("lru")
    assert order_of(cache, sequences) == order_of(*cache_with("lru", sizes, holes))


def test_it_orders_by_index_times_cost():
    cache, (returner, leaver) = cache_with("learned", [(3, 300.0), (3, 1.0)])
    model = ReturnModel()
    returner.bucket, leaver.bucket = 5, 6
    for _ in range(500):
        model.close(5, 310.0, returned=True)
        model.close(6, 5000.0, returned=False)
    model.fit(np.zeros((NUM_BUCKETS, NUM_BINS)))
    cache.policy.use(model)
    cache.policy.select("returns")
    assert order_of(cache, [returner, leaver]) == [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("followed", ORDERS)
@given(
    seed=st.integers(0, 1000),
    sizes=sizes_strategy,
    changes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=40),
)
def test_the_order_equals_an_exhaustive_search(followed, seed, sizes, changes):
    """Time passes, bins end, models are fitted, orders change; conversations come, leave and are evicted.

    A turn may be answered after its conversation became idle, as when it ends by length.
    """
    cache, sequences = cache_with("learned", sizes)
    policy, rng = cache.policy, random.Random(seed)
    policy.use(habits(seed))
    policy.select(followed)
    for sequence in sequences:
        sequence.bucket = rng.randrange(NUM_BUCKETS)
    store, turns = cache.manager._store, cache.manager.turns
    noted = dict.fromkeys(sequences)
    order = VictimOrder(policy, EvictionClass.DIRTY, noted)
    for number, change in changes:
        sequence = sequences[number % len(sequences)]
        if change == 0:
            cache.clock.advance(rng.choice((0.3, 7.0, 400.0)))
        elif change == 1 and sequence.role is Role.IDLE:
            cache.queued(sequence.sequence_id, sequence)
        elif change == 2 and sequence.role is Role.QUEUED:
            sequence.bucket = rng.randrange(NUM_BUCKETS)
            cache.manager.release(sequence)
        elif change == 3 and sequence.role is Role.IDLE:
            cache.manager.truncate(sequence, max(sequence.num_kv_tokens - CHUNK, 0))
        elif change == 4 and sequence.role is Role.IDLE:
            cache.manager.touch(sequence)
        elif change == 5 and sequence.role is Role.IDLE:
            cache.running(sequence.sequence_id, 5 * CHUNK, sequence)
            cache.manager.release(sequence)
        elif change == 8:
            turns.answered(sequence, CHUNK, prompt_tokens=rng.randrange(20_000), output_tokens=CHUNK)
        elif change == 6:
            policy.model.returns[rng.randrange(NUM_BUCKETS)] += 3
            policy.model.fit(np.zeros((NUM_BUCKETS, NUM_BINS)))
        elif change == 7:
            policy.select(rng.choice(ORDERS))
        else:
            victim = peek(order, cache)
            for chunk in () if victim is None else victim.indices:
                store.drop(victim.sequence, chunk, DropReason.NO_HOST_MEMORY, None)
            if victim is not None:
                store.trim(victim.sequence)
        noted.update(store.changed[EvictionClass.DIRTY])
        store.changed[EvictionClass.DIRTY].clear()  # sequences without a notification must not need one
        assert_is_least(order, cache, sequences)


def assert_is_least(order, cache, sequences):
    victim, now_s, expected = peek(order, cache), cache.clock.now(), []
    for one in sequences:
        if one.role is Role.IDLE and one.num_by_class[EvictionClass.DIRTY]:
            chunk = one.first_of(EvictionClass.DIRTY)
            expected.append((cache.policy.worth(one, chunk, now_s), one.role_number, one))
    found = None if victim is None else (victim.worth, victim.sequence.role_number, victim.sequence)
    assert found == min(expected, default=None)


@dataclass
class Plain:
    """A conversation in the slow ghost cache."""

    bucket: int
    last_active_s: float
    number: int
    num_blocks: int
    num_shared: int
    num_lost: int = 0
    is_idle: bool = True


class SlowShadow:
    """The same as `GhostCache`, by scanning all conversations for every block."""

    def __init__(self, policy, num_places):
        self.policy, self.num_places, self.known = policy, num_places, {}

    def returned(self, name):
        plain = self.known.get(name)
        if plain is None or plain.num_lost == plain.num_blocks - plain.num_shared:
            return None
        num_lost, plain.num_lost, plain.is_idle = plain.num_lost, 0, False
        return num_lost

    def left(self, name, num_blocks, *, num_shared, bucket, now_s, number):
        self.known[name] = Plain(bucket, now_s, number, num_blocks, min(num_shared, num_blocks))
        while sum(p.num_blocks - p.num_shared - p.num_lost for p in self.known.values()) > self.num_places:
            idle = [p for p in self.known.values() if p.is_idle and p.num_lost < p.num_blocks - p.num_shared]
            if not idle:
                return
            worths = [(self.policy.worth(p, p.num_shared + p.num_lost, now_s), p.number) for p in idle]
            idle[worths.index(min(worths))].num_lost += 1


@pytest.mark.parametrize("name", ORDERS)
@given(
    seed=st.integers(0, 10_000),
    turns=st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(1, 12)), max_size=60),
)
def test_a_ghost_cache_keeps_what_a_cache_with_that_order_would(name, seed, turns):
    orders = {
        "retention": RetentionPolicy(COSTS, BLOCK_TOKENS),
        "lru": RecencyPolicy(),
        "returns": ReturnsPolicy(habits(seed), COSTS, BLOCK_TOKENS),
    }
    fast, slow = GhostCache(orders[name], 20), SlowShadow(orders[name], 20)
    running, rng, now_s, number = set(), random.Random(seed), 0.0, 0
    for conversation, leaves, num_blocks in turns:
        now_s += rng.choice((0.5, 3.0, 100.0))
        key = str(conversation)
        if leaves:
            number += 1
            common = {"num_shared": rng.randrange(3), "bucket": rng.randrange(NUM_BUCKETS), "now_s": now_s}
            fast.left(key, num_blocks, **common)
            slow.left(key, num_blocks, **common, number=number)
            running.discard(key)
        elif key not in running:
            assert fast.returned(key) == slow.returned(key)
            running.add(key)
    held = sum(p.num_blocks - p.num_shared - p.num_lost for p in slow.known.values())
    assert fast.num_held == held


def test_a_ghost_cache_does_not_keep_conversations_without_own_blocks():
    ghost = GhostCache(RecencyPolicy(), 20)
    for i in range(100):
        ghost.left(str(i), 2, num_shared=2, bucket=1, now_s=float(i))
    assert not ghost._entries and not ghost._noted and not ghost.num_held
    assert ghost.returned("0") is None
    common = {"num_shared": 0, "bucket": 1, "now_s": 200.0}
    ghost.left("big", 20, **common)
    ghost.left("more", 5, **common)
    assert ghost.returned("big") == 5 and ghost.num_held == 25
    ghost.left("none", 2, num_shared=2, bucket=1, now_s=201.0)
    assert ghost.num_held == 20, "a ghost makes its own room"


def insured(model: ReturnModel, followed: str, num_tokens: int) -> PolicySelector:
    orders = {
        "retention": RetentionPolicy(COSTS, BLOCK_TOKENS),
        "lru": RecencyPolicy(),
        "returns": ReturnsPolicy(model, COSTS, BLOCK_TOKENS),
    }
    return PolicySelector(orders, COSTS, selected=followed, chunk_tokens=CHUNK, num_tokens=num_tokens)


@pytest.mark.parametrize("seed", range(5))
def test_an_order_that_keeps_losing_is_soon_left(seed):
    """The model is wrong: it was taught that returning users leave, and the other way round."""
    print("seed", seed)
    rng, model = random.Random(seed), ReturnModel()
    for _ in range(1000):
        model.close(1, 1.0, returned=False)
        model.close(1, 15_000.0, returned=True)
        model.close(2, 30.0, returned=True)
    model.fit(np.zeros((NUM_BUCKETS, NUM_BINS)))
    selector = insured(model, "returns", 40 * BLOCK_TOKENS)
    now_s, paid_s, before = 0.0, 0.0, dict(selector.lost_s)
    size = 5 * BLOCK_TOKENS
    for i in range(600):
        now_s += 5.0
        if i >= 4 and rng.random() < 0.9:  # those of bucket 1 return after 20 s
            selector.returned(f"good-{i % 4}", size, 0)
            followed = selector.selected
            paid_s += selector.lost_s[followed] - before[followed]
            before = dict(selector.lost_s)
        selector.left(f"good-{i % 4}", size, 0, bucket=1, now_s=now_s)
        selector.left(f"bad-{i}", size, 0, bucket=2, now_s=now_s)
    best_s = min(selector.lost_s.values())
    assert selector.lost_s["returns"] > 3 * best_s, "the trace does not hurt"
    assert selector.selected != "returns"
    assert paid_s < best_s + 0.1 * selector.lost_s["returns"]


def test_chance_alone_changes_little():
    """Three orders have equal expected losses, which differ by orders of magnitude from turn to turn."""
    selector = insured(ReturnModel(), "retention", 10 * BLOCK_TOKENS)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        losses_s = np.exp(3 * rng.standard_normal(3))
        selector._add(losses_s)
    assert selector.num_changes <= 10


def test_its_losses_are_exported():
    first = insured(ReturnModel(), "retention", 10 * BLOCK_TOKENS)
    for i in range(50):
        first._add(np.array([1.0, 2.0, 0.25 + 0.01 * (i % 3)]))
    assert first.selected == "returns"
    orders = dict(zip(ORDERS, (RecencyPolicy(),) * 3, strict=True))
    second = PolicySelector(
        orders,
        COSTS,
        selected=first.selected,
        chunk_tokens=CHUNK,
        num_tokens=10 * BLOCK_TOKENS,
        losses=first.losses,
    )
    assert second.losses == first.losses and second.selected == "returns"


@pytest.mark.parametrize(("num_blocks", "factor"), [(1000, 1.0), (1, 1.0), (10, 0.01)])
def test_losses_of_another_memory_size_or_model_are_forgotten(num_blocks, factor):
    """Otherwise a few turns here would weigh nothing against thousands there, and a bad order would stay."""
    first = insured(ReturnModel(), "retention", 10 * BLOCK_TOKENS)
    for i in range(3000):
        first._add(np.array([100.0, 200.0, 1.0 + 0.01 * (i % 3)]))
    costs = AnalyticCostModel(CHUNK, num_weights=1e3 * factor, attention_width=1e3 * factor)
    orders = dict(zip(ORDERS, (RecencyPolicy(),) * 3, strict=True))
    common = {"chunk_tokens": CHUNK, "num_tokens": num_blocks * BLOCK_TOKENS}
    second = PolicySelector(orders, costs, selected="returns", losses=first.losses, **common)
    assert second.selected == "retention" and not any(second.losses.sums_s)
    for i in range(20):
        second._add(np.array([2.0, 0.01 * (i % 2), 3.0]))
    assert second.selected == "lru"


def test_a_shared_prefix_does_not_count_as_the_users_prompt():
    """A system prompt of thousands of tokens says nothing about the sender of the first message."""
    buckets = []
    for num_shared in (0, 100):
        cache = Cache(400, policy="learned")
        sequence = cache.manager.open("a")
        cache.manager.share(sequence, cache.manager.open_prefix("prefix", num_shared * CHUNK))
        num_tokens = (num_shared + 4) * CHUNK
        cache.running("a", num_tokens, sequence)
        prompt_tokens = num_tokens - CHUNK
        cache.manager.turns.answered(sequence, num_tokens, prompt_tokens=prompt_tokens, output_tokens=CHUNK)
        buckets.append(sequence.bucket)
    assert buckets[0] == buckets[1]


def test_one_page_more_is_not_another_memory_size():
    first = insured(ReturnModel(), "retention", 100 * BLOCK_TOKENS)
    first._add(np.array([1.0, 2.0, 3.0]))
    assert first.losses.holds_for(insured(ReturnModel(), "lru", 101 * BLOCK_TOKENS).losses.counted_for)


def test_a_prefix_is_valued_like_its_latest_users_turns():
    cache = Cache(200, policy="learned")
    prefix = cache.manager.open_prefix("prefix", 2 * CHUNK)
    sequence = cache.manager.open("a")
    cache.manager.share(sequence, prefix)
    cache.running("a", 4 * CHUNK, sequence)
    cache.manager.release(sequence)
    changed = cache.manager._store.changed[EvictionClass.DIRTY]
    changed.clear()
    cache.manager.turns.answered(sequence, 4 * CHUNK, prompt_tokens=3 * CHUNK, output_tokens=CHUNK)
    assert prefix.bucket == sequence.bucket > 0
    assert set(changed) == {prefix, sequence}


def test_turns_reach_the_order_through_the_manager():
    """The engine loop reports them; one-off or withdrawn turns are ignored."""
    cache = Cache(200, policy="learned")
    manager = cache.manager
    for i in range(64):
        sequence = cache.running(f"s{i}", 3 * CHUNK)
        manager.turns.answered(sequence, 3 * CHUNK, prompt_tokens=2 * CHUNK, output_tokens=CHUNK)
        manager.release(sequence)
        cache.clock.advance(2.0)
        manager.turns.sent(sequence, 3 * CHUNK)
        manager.close(sequence)
    learned_state = manager.turns.learned_state()
    assert learned_state.num_returns == 64 and (learned_state.returns.sum(1) > 0).sum() == 1
    assert learned_state.exposure_s.sum() == pytest.approx(128.0)
    assert manager.stats()["num_returns_seen"] == 64
    manager.turns.begin(None)
    assert manager.turns.learned_state().num_returns == 0


def test_orders_that_do_not_learn_have_no_learned_state():
    cache = Cache(policy="retention")
    assert cache.manager.turns.learned_state() is None and cache.manager.turns.describe() is None


def test_a_policy_starts_with_the_order_of_its_learned_state():
    cache = Cache(200, policy="learned")
    policy = cache.manager._policy
    assert isinstance(policy, LearnedPolicy) and policy.selected == "retention"
    learned_state = cache.manager.turns.learned_state()
    cache.manager.turns.begin(
        type(learned_state)(learned_state.returns, learned_state.exposure_s, "lru", learned_state.losses)
    )
    assert policy.selected == "lru" and "'lru'" in cache.manager.turns.describe()
