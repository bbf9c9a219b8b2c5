"""The evictor call by call: ties, limits, and what a call must not change."""

from __future__ import annotations

import math

import pytest

from pensieve_jax.cache import ChunkDrop, DropReason, EvictionClass
from tests.cache.helpers import CHUNK, Cache, states


def test_a_queued_request_does_not_drop_its_own_chunks_for_itself():
    """Host memory is full with its first chunk, and its second one must leave the device."""
    cache = Cache(4, 1)
    first = cache.running("first", 2 * CHUNK)
    waits = cache.queued("waits", cache.on_cpu("waits", 2 * CHUNK, but=[1]))
    cache.manager.begin_step()
    assert cache.manager.grow(first, 4 * CHUNK)
    assert states(waits) == ["on cpu"] and waits.num_kv_tokens == CHUNK
    assert cache.manager.take_drops() == (ChunkDrop("waits", 1, DropReason.NO_SLOT, math.inf),)
    cache.check()


def test_a_later_request_that_loses_its_last_chunk_in_host_memory_is_empty():
    """The only slot belongs to the later request; the earlier one's page must leave the device."""
    cache = Cache(3, 1)
    first = cache.running("first", 2 * CHUNK)
    late, early = cache.on_cpu("late", CHUNK), cache.idle("early", CHUNK)
    cache.queued("early", early)
    cache.queued("late", late)
    cache.manager.begin_step()
    assert cache.manager.grow(first, 3 * CHUNK)
    assert cache.manager.take_drops() == (ChunkDrop("late", 0, DropReason.EARLIER_REQUEST, math.inf),)
    assert states(early) == ["leaving"] and late.chunks == [] and late.num_kv_tokens == 0
    cache.check()


def test_in_host_memory_a_tie_goes_to_the_new_chunk():
    cache = Cache(2, 1, policy="lru")
    cache.on_cpu("old", CHUNK, 50.0)
    comes = cache.idle("comes", 2 * CHUNK, 50.0)
    cache.running("new", CHUNK)
    assert states(comes) == ["leaving", "on gpu"]
    assert [(drop.conversation_id, drop.reason) for drop in cache.manager.take_drops()] == [
        ("old", DropReason.SLOT_NEEDED)
    ]


def test_a_page_that_needs_a_copy_is_not_spare():
    cache = Cache(3, 3)
    clean, dirty = cache.on_both("clean", CHUNK), cache.idle("dirty", CHUNK)
    evictor = cache.manager._evictor
    evictor.begin_pass()
    assert [evictor.allocate_spare_page() is None for _ in range(3)] == [False, False, True]
    assert states(clean) == ["on cpu"] and states(dirty) == ["on gpu"]


def test_pages_are_pushed_out_leading_first_with_or_without_a_copy():
    cache = Cache(8, 8)
    sequence = cache.on_both("a", 4 * CHUNK, but=[0, 2])
    assert cache.manager.push_out(sequence, 3) == 3
    assert states(sequence) == ["leaving", "on cpu", "leaving", "on both"]
    assert cache.manager.stats()["num_forced_swap_outs"] == 2


def test_clean_chunks_of_waiting_requests_count_as_clean_pages():
    cache = Cache(10, 20, clean_pages=4)
    cache.queued("waits", cache.on_both("waits", 4 * CHUNK))
    cache.idle("idle", 6 * CHUNK)
    assert cache.pool.num_free == 0 and cache.end_step() == ([], [])


@pytest.mark.parametrize(
    ("clean_pages", "num_copied"), [(1, 2), (3, 4), (8, 10), (64, 80 - 32), (80, 96 - 40), (10, 12)]
)
def test_ahead_of_need_a_quarter_more_than_missing_is_copied_and_at_most_sixteen(clean_pages, num_copied):
    """At first no page is clean. A step copies sixteen, or what is missing beyond the half."""
    cache = Cache(200, 200, clean_pages=clean_pages)
    cache.idle("idle", 200 * CHUNK)
    assert len(cache.end_step()[0]) == num_copied


def test_a_pass_uses_one_order_at_one_time():
    """The clock advances within a pass; the value of a dropped chunk is that of the pass."""
    cache = Cache(4)
    cache.idle("a", 4 * CHUNK, 10.0)
    cache.queued("new")
    evictor = cache.manager._evictor
    cache.manager.begin_step()
    evictor.allocate_page(9)
    cache.clock.advance(10.0)
    evictor.allocate_page(9)
    first, second = (drop.worth for drop in cache.manager.take_drops())
    assert first == pytest.approx(cache.policy.worth(_Active(90.0), 0, 100.0))
    assert second == pytest.approx(cache.policy.worth(_Active(90.0), 1, 100.0))
    cache.manager.begin_step()
    evictor.allocate_page(9)
    (third,) = (drop.worth for drop in cache.manager.take_drops())
    assert third == pytest.approx(cache.policy.worth(_Active(90.0), 2, 110.0))


def test_a_pass_has_the_time_of_its_first_request_for_an_idle_chunk():
    cache = Cache(2)
    sequence, evictor = cache.running("a", 2 * CHUNK), cache.manager._evictor
    evictor.begin_pass()
    assert evictor.allocate_page(9) is None
    cache.clock.advance(10.0)
    cache.manager.release(sequence)
    cache.manager._store.set_active(sequence, 90.0)
    assert evictor.allocate_page(9) is not None
    (drop,) = cache.manager.take_drops()
    assert drop.worth == pytest.approx(cache.policy.worth(_Active(90.0), 0, 110.0))


class _Active:
    """A conversation with a given time of last activity."""

    bucket = 0

    def __init__(self, last_active_s: float) -> None:
        self.last_active_s = last_active_s


# Lending slots.


def lender(cache: Cache, num_chunks: int = 3):
    """Return a running sequence with complete copies, in a pass that begins."""
    sequence = cache.queued("a", cache.on_both("a", num_chunks * CHUNK))
    assert cache.manager.try_admit(sequence, num_chunks * CHUNK, waive_reserve=True)
    cache.manager.begin_step()
    return sequence


def test_slots_are_lent_one_by_one_leading_first():
    cache = Cache(8, 8)
    sequence = lender(cache)
    borrow = cache.manager._evictor._borrow_slot
    for num_lent in range(1, 4):
        assert borrow()
        assert states(sequence) == ["on gpu"] * num_lent + ["on both"] * (3 - num_lent)
    assert not borrow() and cache.slots.num_free == 8


def test_a_sequence_that_became_idle_lends_nothing():
    cache = Cache(8, 8)
    sequence = lender(cache)
    assert cache.manager._evictor._borrow_slot()
    cache.manager.release(sequence)
    assert not cache.manager._evictor._borrow_slot()
    assert states(sequence) == ["on gpu", "on both", "on both"]


def test_a_sequence_that_was_cut_lends_what_is_left():
    cache = Cache(8, 8)
    sequence, other = lender(cache), cache.on_both("other", CHUNK)
    cache.queued("other", other)
    assert cache.manager._evictor._borrow_slot()
    cache.manager.truncate(sequence, CHUNK)
    assert cache.manager._evictor._borrow_slot() and states(other) == ["on gpu"]
    assert not cache.manager._evictor._borrow_slot()


def test_a_chunk_that_is_being_copied_out_lends_nothing():
    cache = Cache(8, 8, clean_pages=8)
    sequence = cache.idle("a", 2 * CHUNK)
    cache.end_step()
    cache.queued("a", sequence)
    cache.manager.begin_step()
    assert not cache.manager._evictor._borrow_slot()
    assert states(sequence) == ["copying out"] * 2 and sequence.num_by_class[EvictionClass.CLEAN] == 2
