"""The order in which owners are served, and what it evens out."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pensieve_jax.server.fair_queue import FairQueue
from tests.seeds import new_seed


def test_the_entries_of_one_owner_leave_in_order_of_arrival():
    queue = FairQueue[int]()
    for number in range(5):
        queue.add("a", number, 10.0 - number)
    assert queue.first() == 0
    assert [queue.take() for _ in range(5)] == list(range(5))
    assert queue.first() is None and not len(queue)
    with pytest.raises(IndexError):
        queue.take()


def test_an_owner_with_one_entry_is_served_next_but_one_behind_an_owner_with_many():
    queue = FairQueue[str]()
    for number in range(64):
        queue.add("many", f"many {number}", 1.0)
    assert queue.take() == "many 0"
    queue.add("one", "one", 1.0)
    assert [queue.take() for _ in range(2)] == ["many 1", "one"]


def test_an_owner_that_was_away_has_no_credit():
    queue = FairQueue[str]()
    for _ in range(100):
        queue.add("busy", "busy", 1.0)
    for _ in range(50):
        queue.take()
    for _ in range(50):
        queue.add("late", "late", 1.0)
    assert Counter(queue.take() for _ in range(40)) == {"busy": 20, "late": 20}


def test_an_owner_that_comes_back_keeps_what_it_was_served_meanwhile():
    queue = FairQueue[str]()
    for _ in range(10):
        queue.add("steady", "steady", 1.0)
    queue.add("bursts", "large", 8.0)
    assert queue.take() == "steady" and queue.take() == "large"
    queue.add("bursts", "again", 1.0)
    assert [queue.take() for _ in range(9)] == ["steady"] * 8 + ["again"]


def test_a_removed_entry_costs_nothing():
    queue = FairQueue[str]()
    queue.add("a", "gone", 100.0)
    queue.add("a", "stays", 1.0)
    queue.add("b", "b", 2.0)
    assert queue.remove("a", "gone") and not queue.remove("a", "gone") and not queue.remove("c", "gone")
    assert [queue.take(), queue.take()] == ["stays", "b"]


def test_a_correction_moves_an_owner_back_or_forward():
    queue = FairQueue[str]()
    for _ in range(4):
        queue.add("a", "a", 1.0)
        queue.add("b", "b", 1.0)
    assert queue.take() == "a"
    queue.charge("a", 2.0)  # its reply was longer
    assert [queue.take() for _ in range(3)] == ["b", "b", "b"]
    queue.charge("b", -2.0)
    queue.charge("unknown", 5.0)
    assert [queue.take() for _ in range(2)] == ["b", "a"]


@pytest.mark.parametrize("round_", range(20))
def test_owners_that_always_wait_are_served_the_same_cost_and_none_is_lost(round_):
    seed = new_seed()
    draw = random.Random(seed)
    queue, most = FairQueue[tuple[str, int]](), 50.0
    served: Counter[str] = Counter()
    owners = [f"owner {number}" for number in range(draw.randint(2, 5))]
    costs: dict[tuple[str, int], float] = {}
    waiting: Counter[str] = Counter()
    for number in range(2000):
        for index, owner in enumerate(owners):
            while waiting[owner] <= 1 + 10 * index:  # some have many more entries than others
                entry = (owner, len(costs))
                costs[entry] = draw.uniform(0.0, most)
                queue.add(owner, entry, costs[entry])
                waiting[owner] += 1
        if draw.random() < 0.1:
            owner = draw.choice(owners)
            gone = next(entry for entry in costs if entry[0] == owner and costs[entry] >= 0)
            waiting[owner] -= queue.remove(owner, gone)
            costs[gone] = -1.0
            continue
        entry = queue.take()
        waiting[entry[0]] -= 1
        served[entry[0]] += costs[entry]
        costs[entry] = -1.0
        assert len(queue) == waiting.total(), (seed, number)
    assert max(served.values()) - min(served.values()) <= 2 * most, (seed, served)
