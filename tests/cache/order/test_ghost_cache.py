"""Content of a ghost cache, counted by hand."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import EvictionClass, Role
from pensieve_jax.cache.order.ghost_cache import GhostCache, GhostEntry
from pensieve_jax.cache.order.policies import RecencyPolicy


def shadows_of(num_places: int, *sizes: int) -> GhostCache:
    """Return a ghost cache of conversations "0", "1", ... that left one second after the other."""
    cache = GhostCache(RecencyPolicy(), num_places)
    for number, size in enumerate(sizes):
        cache.left(str(number), size, num_shared=0, bucket=0, now_s=float(number))
    return cache


def lost(cache: GhostCache) -> dict[str, int]:
    return {name: ghost.num_lost for name, ghost in cache._entries.items()}


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        ((10, 0, 0), (0, 10, 10)),
        ((10, 3, 0), (3, 7, 7)),
        ((10, 3, 2), (5, 5, 5)),
        ((10, 12, 5), (10, 0, 0)),
        ((10, 6, 9), (10, 0, 0)),
    ],
)
def test_present_blocks_follow_shared_and_lost_ones(size, counts):
    ghost = GhostEntry("a")
    assert ghost.role is Role.RUNNING and (ghost.num_held, ghost.bucket, ghost.last_active_s) == (0, 0, 0)
    ghost.set_size(*size)
    first, num_held, num_indices = counts
    assert (ghost.first_of(EvictionClass.HOST), ghost.num_held) == (first, num_held)
    assert list(ghost.indices_of(EvictionClass.HOST)) == list(range(first, 10)) and num_indices == 10 - first
    assert ghost.last_of(EvictionClass.HOST) == 9


def test_nothing_is_evicted_while_all_fits():
    cache = shadows_of(10, 4, 6)
    assert cache.num_held == 10 and lost(cache) == {"0": 0, "1": 0}


def test_the_order_evicts_from_the_front_until_the_rest_fits():
    cache = shadows_of(10, 4, 6, 3)
    assert cache.num_held == 10 and lost(cache) == {"0": 3, "1": 0, "2": 0}
    assert cache.returned("0") == 3 and cache.num_held == 13, "it is there again, and running"
    assert cache.returned("1") == 0 and cache.returned("9") is None


def test_a_conversation_that_has_lost_everything_is_forgotten():
    cache = shadows_of(10, 4, 6, 4)
    assert lost(cache) == {"1": 0, "2": 0} and cache.returned("0") is None and cache.num_held == 10


def test_room_is_made_in_batches():
    """The cache may exceed its size by one place in 64; then all of these are freed."""
    cache = shadows_of(128, 100, 30)
    assert cache.num_held == 130 and lost(cache) == {"0": 0, "1": 0}
    cache.left("2", 1, num_shared=0, bucket=0, now_s=2.0)
    assert cache.num_held == 128 and lost(cache) == {"0": 3, "1": 0, "2": 0}


def test_a_running_conversation_loses_nothing():
    cache = shadows_of(10, 8, 2)
    cache.returned("0")
    cache.left("2", 5, num_shared=0, bucket=0, now_s=2.0)
    assert lost(cache) == {"0": 0, "2": 3} and cache.num_held == 10


def test_a_conversation_that_leaves_again_is_complete_and_ranks_last():
    cache = shadows_of(10, 4, 6, 3)
    cache.left("0", 5, num_shared=0, bucket=0, now_s=3.0)
    assert lost(cache) == {"0": 0, "1": 4, "2": 0} and cache.num_held == 10


@pytest.mark.parametrize(
    ("num_lost", "before", "after", "lost_after", "held_after"),
    [
        (0, 0, 2, 0, 4),
        (3, 0, 2, 1, 3),
        (1, 0, 2, 0, 4),
        (2, 2, 0, 4, 2),
        (0, 2, 0, 0, 6),
        (0, 2, 1, 0, 5),
    ],
)
def test_blocks_that_others_share_are_not_its_own(num_lost, before, after, lost_after, held_after):
    cache = GhostCache(RecencyPolicy(), 20)
    cache.left("a", 6, num_shared=before, bucket=0, now_s=0.0)
    cache._resize(cache._entries["a"], 6, before, num_lost)
    cache._noted.clear()
    cache.resized("a", after)
    ghost = cache._entries["a"]
    assert (ghost.num_shared, ghost.num_lost, ghost.num_held) == (after, lost_after, held_after)
    assert cache.num_held == held_after and cache._noted == {ghost: None}


def test_a_conversation_that_shares_everything_is_forgotten_unless_it_runs():
    cache = shadows_of(20, 6, 6)
    cache.resized("0", 6)
    cache.returned("1")
    cache.resized("1", 6)
    cache.resized("unknown", 6)
    assert list(cache._entries) == ["1"] and cache.num_held == 0 and not cache._noted


def test_an_ended_conversation_takes_its_blocks_along():
    cache = shadows_of(20, 6, 5)
    cache.ended("0")
    cache.ended("0")
    assert cache.num_held == 5 and list(cache._entries) == ["1"]
    assert [ghost.conversation_id for ghost in cache._noted] == ["1"]
