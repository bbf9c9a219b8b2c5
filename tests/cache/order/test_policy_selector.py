"""The rule that selects another order, and the cost of turns, counted by hand."""

from __future__ import annotations

import pytest

from pensieve_jax.cache.order.policies import RecencyPolicy
from pensieve_jax.cache.order.policy_selector import BLOCK_TOKENS, PolicyLosses, PolicySelector, _num_blocks


class Constant:
    """A chunk costs one second wherever it ends, or as many seconds as the number of blocks up to its end."""

    def __init__(self, *, grows: bool = False) -> None:
        self.grows = grows

    def chunk_cost_s(self, context_len: int) -> float:
        return context_len / BLOCK_TOKENS if self.grows else 1.0


def selector_of(num_tokens: int = 10 * BLOCK_TOKENS, *, grows: bool = False, **options) -> PolicySelector:
    orders = {"one": RecencyPolicy(), "two": RecencyPolicy()}
    options = {"selected": "one", "chunk_tokens": 64} | options
    return PolicySelector(orders, Constant(grows=grows), num_tokens=num_tokens, **options)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(0, 0), (1, 1), (255, 1), (256, 1), (383, 1), (385, 2), (512, 2), (640 + 1, 3), (25_600, 100)],
)
def test_block_counts_are_rounded_and_at_least_one(num_tokens, num_blocks):
    assert _num_blocks(num_tokens) == num_blocks


def test_a_block_costs_as_much_as_its_chunks():
    selector = selector_of()
    assert [selector._cost_s(number) for number in (3, 0, 1, 2)] == [12.0, 0.0, 4.0, 8.0]
    growing = selector_of(grows=True)
    assert [growing._cost_s(number) for number in (1, 2)] == [
        (64 + 128 + 192 + 256) / 256,
        sum(range(64, 513, 64)) / 256,
    ]


def test_it_is_identified_by_its_size_and_its_costs():
    assert selector_of(1234).losses.counted_for == (1234.0, 4 * 4.0, 32 * 4.0)


@pytest.mark.parametrize(("num_tokens", "num_places"), [(100, 1), (BLOCK_TOKENS * 3 - 1, 2), (768, 3)])
def test_its_memory_is_at_least_one_block(num_tokens, num_places):
    ghosts = selector_of(num_tokens)._ghosts
    assert [ghost._num_places for ghost in ghosts] == [num_places] * 2


@pytest.mark.parametrize(
    ("known", "counted_for", "holds"),
    [
        ((), (100.0, 1.0), True),
        ((100.0, 1.0), (100.0, 1.0), True),
        ((100.0, 1.0), (109.0, 1.0), True),
        ((100.0, 1.0), (100.0, 1.2), False),
        ((100.0, 1.0), (80.0, 1.0), False),
        ((100.0,), (100.0, 1.0), False),
    ],
)
def test_losses_are_valid_for_a_similar_memory_size(known, counted_for, holds):
    assert PolicyLosses((), (), known).holds_for(counted_for) is holds


# The cost of turns.


def test_a_turn_pays_for_what_its_ghost_cache_has_lost():
    selector = selector_of(10 * BLOCK_TOKENS)
    selector.left("a", 6 * BLOCK_TOKENS, 0, bucket=0, now_s=0.0)
    selector.left("b", 7 * BLOCK_TOKENS, 0, bucket=0, now_s=1.0)
    selector.returned("b", 7 * BLOCK_TOKENS, 0)
    assert selector.lost_s == {"one": 0.0, "two": 0.0}
    selector.returned("a", 6 * BLOCK_TOKENS, 0)
    assert selector.lost_s == {"one": 12.0, "two": 12.0}, "three blocks of four chunks"
    selector.returned("c", 2 * BLOCK_TOKENS, 0)
    assert selector.lost_s == {"one": 20.0, "two": 20.0}, "nothing is known of it: all of it"


def test_a_shared_prefix_is_not_paid_for():
    selector = selector_of(10 * BLOCK_TOKENS, grows=True)
    selector.returned("new", 3 * BLOCK_TOKENS, BLOCK_TOKENS)
    expected = sum(range(256 + 64, 768 + 1, 64)) / 256
    assert selector.lost_s["one"] == pytest.approx(expected)
    selector.left("a", 6 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, bucket=0, now_s=0.0)
    selector.left("b", 9 * BLOCK_TOKENS, 0, bucket=0, now_s=1.0)
    selector.returned("a", 6 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    blocks = sum(range(512 + 64, 512 + 3 * 256 + 1, 64)) / 256  # the three behind the prefix
    assert selector.lost_s["one"] == pytest.approx(expected + blocks)


def test_a_turn_pays_for_at_most_its_history():
    """Covers a prefix longer than the history, and a ghost cache that has lost more than there is now."""
    selector = selector_of(10 * BLOCK_TOKENS)
    selector.returned("a", BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert selector.lost_s["one"] == 0.0
    selector.left("b", 6 * BLOCK_TOKENS, 0, bucket=0, now_s=0.0)
    selector.left("c", 9 * BLOCK_TOKENS, 0, bucket=0, now_s=1.0)
    selector.returned("b", 2 * BLOCK_TOKENS, 0)
    assert selector.lost_s["one"] == 8.0


def test_resizing_and_ending_apply_to_every_ghost_cache():
    selector = selector_of()
    selector.left("a", 6 * BLOCK_TOKENS, 0, bucket=0, now_s=0.0)
    selector.resized("a", 2 * BLOCK_TOKENS)
    assert [ghost.num_held for ghost in selector._ghosts] == [4, 4]
    selector.ended("a")
    assert [ghost.num_held for ghost in selector._ghosts] == [0, 0]


# The rule.


def test_another_order_is_followed_beyond_three_percent_of_the_losses():
    """After one turn the difference equals its standard error, so a single turn does not suffice."""
    selector = selector_of()
    selector._add([1.0, 0.5])
    assert selector.selected == "one" and selector.num_changes == 0
    selector._add([1.0, 0.5])
    assert selector.selected == "two" and selector.num_changes == 1


@pytest.mark.parametrize(("other_s", "followed"), [(0.96, "two"), (0.98, "one"), (1.0, "one"), (1.1, "one")])
def test_a_gain_of_less_than_three_percent_is_ignored(other_s, followed):
    selector = selector_of()
    for _ in range(2000):
        selector._add([1.0, other_s])
    assert selector.selected == followed and selector.num_changes == (followed == "two")


def test_the_best_of_several_is_followed():
    orders = dict.fromkeys("abcd", RecencyPolicy())
    orders = {name: RecencyPolicy() for name in orders}
    selector = PolicySelector(orders, Constant(), selected="b", chunk_tokens=64, num_tokens=2560)
    for _ in range(20):
        selector._add([0.5, 1.0, 0.2, 0.3])
    assert selector.selected == "c"


def test_losses_that_differ_by_chance_are_not_evidence():
    """The sum of the differences is 1, and its standard error 9 times the root of 3."""
    selector = selector_of()
    for losses_s in ([10.0, 1.0], [1.0, 10.0], [10.0, 1.0]):
        selector._add(losses_s)
    assert selector.selected == "one"
    sums_s, products, _ = selector.losses
    assert sums_s[0] == pytest.approx(21, rel=1e-2) and sums_s[1] == pytest.approx(12, rel=1e-2)
    assert products[0][0] == pytest.approx(201, rel=1e-2) and products[1][1] == pytest.approx(102, rel=1e-2)
    assert products[0][1] == products[1][0] == pytest.approx(30, rel=1e-2)


def test_losses_decay_by_half_in_five_hundred_turns():
    selector = selector_of()
    selector._add([8.0, 4.0])
    for _ in range(500):
        selector._add([0.0, 0.0])
    sums_s, products, _ = selector.losses
    assert sums_s == pytest.approx((4.0, 2.0))
    assert products[0] == pytest.approx((64 / 4, 32 / 4)) and products[1] == pytest.approx((32 / 4, 16 / 4))


def test_losses_are_continued_only_if_they_are_valid():
    first = selector_of()
    first._add([8.0, 4.0])
    second = selector_of(selected="two", losses=first.losses)
    assert second.selected == "two" and second.losses == first.losses
    assert second.lost_s == {"one": 0.0, "two": 0.0}
    other = selector_of(100 * BLOCK_TOKENS, selected="two", losses=first.losses)
    assert other.selected == "one" and other.losses.sums_s == (0.0, 0.0)
    assert other.losses.products == ((0.0, 0.0), (0.0, 0.0))
    assert selector_of(selected="two").selected == "two", "without losses nothing is forgotten"
