"""The table of legal transitions, and the pool of pages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax.cache import TRANSITIONS, ChunkEvent, ChunkState, TierPool
from pensieve_jax.cache.states import IllegalTransitionError, next_state

LEGAL = {
    ("dropped", "be reserved"): "reserved",
    ("reserved", "be filled"): "on gpu",
    ("reserved", "be cancelled"): "dropped",
    ("on gpu", "be swapped out"): "copying out",
    ("copying out", "arrive"): "on both",
    ("copying out", "lose its copy"): "on gpu",
    ("copying out", "free its page"): "leaving",
    ("copying out", "free its slot"): "on gpu",
    ("leaving", "arrive"): "on cpu",
    ("leaving", "lose its copy"): "dropped",
    ("on both", "free its page"): "on cpu",
    ("on both", "free its slot"): "on gpu",
    ("on cpu", "be swapped in"): "copying in",
    ("copying in", "arrive"): "on both",
    ("copying in", "be cancelled"): "on cpu",
    **{
        (state, "be dropped"): "dropped"
        for state in ("on gpu", "copying out", "leaving", "on both", "on cpu", "copying in")
    },
}


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(ChunkState, ChunkEvent)), ids=lambda x: x.value
)
def test_every_pair_of_state_and_event(state, event):
    """Legal pairs lead to the expected state; every other pair raises."""
    expected = LEGAL.get((state.value, event.value))
    assert ((state, event) in TRANSITIONS) == (expected is not None)
    if expected is not None:
        assert next_state(state, event).value == expected
        return
    with pytest.raises(IllegalTransitionError, match=f"{state.value} cannot {event.value}"):
        next_state(state, event)


def test_every_state_can_be_reached_and_left():
    assert {state for state, _ in TRANSITIONS} == set(ChunkState) == set(TRANSITIONS.values())


def test_pages_are_allocated_once():
    pool = TierPool(4)
    pages = [pool.allocate() for _ in range(4)]
    assert sorted(pages) == [1, 2, 3, 4] and pool.num_free == 0 and pool.num_places == 4
    with pytest.raises(IndexError):
        pool.allocate()
    pool.free(pages[2])
    assert pool.num_free == 1 and pool.allocate() == pages[2]


def test_a_page_is_freed_once():
    pool = TierPool(2)
    page = pool.allocate()
    pool.check_integrity({page})
    pool.free(page)
    pool.check_integrity(set())
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(page)


def test_integrity_finds_errors():
    pool = TierPool(3)
    page = pool.allocate()
    for owned in (set(), {page, 0}, {page, page % 3 + 1}, {page % 3 + 1}):
        with pytest.raises(AssertionError):
            pool.check_integrity(owned)
    pool.check_integrity({page})


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free"]), st.integers(0, 50)), max_size=60))
def test_pool_against_a_set_of_pages(ops):
    """Calls come in any order."""
    pool, owned = TierPool(5), set()
    for op, number in ops:
        if op == "allocate" and len(owned) < 5:
            page = pool.allocate()
            assert page not in owned and 1 <= page <= 5
            owned.add(page)
        elif op == "free" and owned:
            page = sorted(owned)[number % len(owned)]
            pool.free(page)
            owned.remove(page)
        assert pool.num_free == 5 - len(owned)
        pool.check_integrity(owned)
