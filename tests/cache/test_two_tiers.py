"""Two tiers, rule by rule: what is copied when, what is evicted for what, and what is never done twice."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import Role
from tests.cache.helpers import CHUNK, Cache, pages_of, resident, states

# Tails.


def test_appending_to_a_tail_frees_its_stale_copy_at_once():
    cache = Cache(12, 12)
    sequence = cache.on_both("a", 2 * CHUNK + 5)
    cache.queued("a", sequence)
    cache.manager.try_admit(sequence, 3 * CHUNK + 1, waive_reserve=True)
    assert cache.slots.num_free == 9
    cache.manager.fill(sequence, 2 * CHUNK + 5, 3 * CHUNK)
    assert states(sequence) == ["on both", "on both", "on gpu", "reserved"] and cache.slots.num_free == 10
    cache.check()


def test_appending_to_a_tail_that_is_being_copied_detaches_the_copy():
    """Its slot is in use until the copy is complete, and then free; the next copy is a new one."""
    cache = Cache(12, 12, clean_pages=12)
    cache.running("other", 2 * CHUNK)
    sequence = cache.idle("a", CHUNK + 5)
    (_, old), _ = cache.end_step()
    cache.queued("a", sequence)
    cache.manager.try_admit(sequence, 2 * CHUNK, waive_reserve=True)
    cache.manager.fill(sequence, CHUNK + 5, 2 * CHUNK)
    assert states(sequence) == ["copying out", "on gpu"] and cache.slots.num_free == 10
    cache.manager.release(sequence)
    (new,), _ = cache.end_step()
    assert new.slot != old.slot and cache.slots.num_free == 9
    cache.complete(old.copy_id)
    assert states(sequence)[1] == "copying out" and cache.slots.num_free == 10
    cache.complete()
    assert states(sequence) == ["on both", "on both"]


def test_truncating_a_running_sequence_frees_its_reserved_pages():
    """Also in front of the cut, where no step has written them yet."""
    cache = Cache(12)
    sequence = cache.idle("a", 3 * CHUNK)
    cache.drop(sequence, 0)
    cache.queued("a", sequence)
    assert cache.manager.try_admit(sequence, 3 * CHUNK + 1, waive_reserve=True)
    assert states(sequence) == ["reserved", "on gpu", "on gpu", "reserved"]
    cache.manager.truncate(sequence, 2 * CHUNK)
    assert states(sequence) == ["dropped", "on gpu"] and cache.pool.num_free == 11
    cache.check()


# Making room.


def test_a_page_is_reassigned_once_its_gather_was_dispatched():
    """No page is clean: when the copy begins, the page already belongs to another sequence."""
    cache = Cache(6, 6)
    sequence = cache.idle("a", 6 * CHUNK)
    pages = pages_of(sequence)
    runs = cache.running("b", 2 * CHUNK)
    outs, _ = cache.begin()
    assert states(sequence) == ["leaving", "leaving", *["on gpu"] * 4]
    assert sorted(copy.page for copy in outs) == sorted(pages[:2]) == sorted(pages_of(runs))
    assert cache.manager.stats()["num_forced_swap_outs"] == 2
    cache.complete()
    assert states(sequence)[:2] == ["on cpu", "on cpu"]


def test_admission_waits_for_a_chunk_that_is_being_copied_out():
    """Its page is gone and its slot not ready: admission waits for exactly these copies."""
    cache = Cache(6, 6)
    sequence = cache.idle("a", 4 * CHUNK)
    runs = cache.running("b", 4 * CHUNK)
    outs, _ = cache.begin()
    cache.manager.truncate(runs, 0)
    cache.manager.release(runs)
    cache.queued("a", sequence)
    cache.manager.begin_step()
    assert not cache.manager.try_admit(sequence, 4 * CHUNK, waive_reserve=True)
    assert sorted(cache.manager.blocking_copies(sequence)) == [copy.copy_id for copy in outs]
    cache.complete()
    assert cache.manager.try_admit(sequence, 4 * CHUNK, waive_reserve=True)
    assert states(sequence) == ["copying in", "copying in", "on gpu", "on gpu"]


def test_clean_pages_go_before_dirty_ones_whatever_their_value():
    cache = Cache(8, 8)
    dear = cache.on_both("dear", 4 * CHUNK, 1.0)
    cheap = cache.idle("cheap", 4 * CHUNK, 90.0)
    cache.running("new", 3 * CHUNK)
    assert states(dear) == ["on cpu"] * 3 + ["on both"] and states(cheap) == ["on gpu"] * 4
    assert cache.take_drops() == [] and cache.begin() == ([], [])


@pytest.mark.parametrize("role", [Role.RUNNING, Role.QUEUED])
def test_slots_of_chunks_on_the_gpu_go_before_anything_is_dropped(role):
    cache = Cache(12, 4, policy="lru")
    both = cache.queued("both", cache.on_both("both", 2 * CHUNK))
    cache.on_cpu("cpu", 2 * CHUNK, 90.0)
    if role is Role.RUNNING:
        assert cache.manager.try_admit(both, 2 * CHUNK, waive_reserve=True)
    leaves = cache.idle("leaves", 8 * CHUNK, 5.0)
    assert cache.slots.num_free == 0
    cache.running("new", 4 * CHUNK)
    assert (
        states(both) == ["on gpu"] * 2
        and len(cache.begin()[0]) == 2
        and states(leaves)[:2] == ["leaving"] * 2
    )
    assert both.role is role and cache.take_drops() == []


@pytest.mark.parametrize(("idle_s", "dropped"), [(90.0, "cpu"), (1.0, "leaves")])
def test_if_host_memory_is_full_the_lowest_value_is_dropped(idle_s, dropped):
    """Either a chunk in host memory is dropped, or the one on the GPU that would have moved there."""
    cache = Cache(6, 3, policy="lru")
    on_cpu = cache.on_cpu("cpu", 3 * CHUNK, idle_s)
    leaves = cache.idle("leaves", 6 * CHUNK, 5.0)
    cache.running("new", 2 * CHUNK)
    assert cache.take_drops() == [(dropped, 0), (dropped, 1)]
    if dropped == "cpu":
        assert states(on_cpu) == ["dropped", "dropped", "on cpu"] and states(leaves)[:2] == ["leaving"] * 2
    else:
        assert states(on_cpu) == ["on cpu"] * 3 and states(leaves)[:2] == ["dropped"] * 2


def test_idle_chunks_go_first_then_queued_ones_latest_first():
    """Clean idle, dirty idle, then the latest in the queue, its copied chunks first."""
    cache = Cache(9, 20)
    runs = cache.running("runs", CHUNK)
    head = cache.queued("head", cache.on_both("head", 2 * CHUNK, but=[0]))
    last = cache.queued("last", cache.on_both("last", 2 * CHUNK, but=[0]))
    clean, dirty = cache.on_both("clean", 2 * CHUNK), cache.idle("dirty", 2 * CHUNK)
    taken = []
    for num_chunks in range(2, 10):
        before = {s: resident(s) for s in (clean, dirty, last, head)}
        cache.manager.begin_step()
        assert cache.manager.grow(runs, num_chunks * CHUNK)
        taken += [(s.sequence_id, i) for s in before for i in before[s] if i not in resident(s)]
    assert taken == [
        *[("clean", 0), ("clean", 1), ("dirty", 0), ("dirty", 1)],
        *[("last", 1), ("last", 0), ("head", 1), ("head", 0)],
    ]
    assert not cache.manager.grow(runs, 10 * CHUNK) and cache.take_drops() == []


# Suspension.


def test_a_suspended_request_keeps_its_work_in_host_memory():
    cache = Cache(8, 8)
    first, last = cache.running("first", 4 * CHUNK), cache.running("last", 4 * CHUNK)
    cache.manager.begin_step()
    assert not cache.manager.grow(first, 6 * CHUNK)
    cache.manager.suspend(last)
    assert cache.manager.grow(first, 6 * CHUNK)
    assert states(last) == ["leaving", "leaving", "on gpu", "on gpu"] and cache.take_drops() == []
    cache.complete()
    cache.manager.truncate(first, 0)
    cache.manager.release(first)
    cache.manager.begin_step()
    assert cache.manager.try_admit(last, 4 * CHUNK + 1, waive_reserve=True)
    assert states(last) == ["copying in", "copying in", "on gpu", "on gpu", "reserved"]
    assert last.holes(CHUNK) == [], "nothing is computed twice"


def test_a_suspended_request_is_dropped_only_if_host_memory_is_full_of_higher_values():
    cache = Cache(8, 2)
    first, last = cache.running("first", 4 * CHUNK), cache.running("last", 4 * CHUNK)
    cache.manager.suspend(last)
    cache.manager.begin_step()
    assert cache.manager.grow(first, 7 * CHUNK)
    assert states(last) == ["leaving", "leaving", "dropped", "on gpu"]


# Copying in.


def test_admission_copies_in_what_the_host_has_and_recomputes_the_rest():
    cache = Cache(12, 12)
    sequence = cache.on_cpu("a", 6 * CHUNK, but=[2, 5])
    cache.drop(sequence, 0, 4)
    cache.queued("a", sequence)
    cache.manager.begin_step()
    assert cache.manager.try_admit(sequence, 7 * CHUNK, waive_reserve=False)
    assert states(sequence) == [
        *["reserved", "copying in", "on gpu", "copying in", "reserved", "on gpu", "reserved"],
    ]
    assert sequence.holes(CHUNK) == [(0, 16), (64, 80)] and sequence.first_arriving == 1
    _, ins = cache.begin()
    assert [copy.page for copy in ins] == [pages_of(sequence)[1], pages_of(sequence)[3]]
    cache.complete(ins[0].copy_id)
    assert states(sequence)[1] == "on both" and sequence.first_arriving == 3


def test_prefetch_goes_by_arrival_and_takes_only_free_and_clean_pages():
    """Three pages are free, and one is clean; the rest is running, or would have to be copied out."""
    cache = Cache(12, 20)
    late, early = cache.on_cpu("late", 3 * CHUNK), cache.on_cpu("early", 3 * CHUNK, but=[0])
    clean = cache.on_both("clean", CHUNK)
    dirty = cache.idle("dirty", 2 * CHUNK)
    cache.running("runs", 5 * CHUNK)
    cache.queued("early", early)
    cache.queued("late", late)
    _, ins = cache.end_step()
    assert states(early) == ["on gpu", "copying in", "copying in"]
    assert states(late) == ["copying in", "copying in", "on cpu"]
    assert states(clean) == ["on cpu"] and states(dirty) == ["on gpu"] * 2 and len(ins) == 4
    assert early.role is Role.QUEUED and cache.manager.stats()["num_prefetched_chunks"] == 4


def test_prefetch_can_be_turned_off_and_keeps_the_reserve():
    for options, num_copies in (
        ({"prefetch": False}, 0),
        ({"reserve_pages": 2}, 2),
        ({"max_num_copies": 1}, 1),
    ):
        cache = Cache(4, 8, **options)
        cache.queued("a", cache.on_cpu("a", 3 * CHUNK))
        assert len(cache.end_step()[1]) == num_copies, options


def test_prefetched_pages_are_evicted_and_fetched_again():
    """A chunk that was copied in for a queued request still has its copy: taking the page copies nothing."""
    cache = Cache(6, 6)
    runs = cache.running("runs", 2 * CHUNK)
    waits = cache.queued("waits", cache.on_cpu("waits", 3 * CHUNK))
    cache.end_step()
    cache.complete()
    assert states(waits) == ["on both"] * 3
    cache.manager.begin_step()
    assert cache.manager.grow(runs, 5 * CHUNK)
    assert states(waits) == ["on cpu", "on cpu", "on both"] and cache.begin() == ([], [])


def test_pages_being_copied_to_are_not_available():
    cache = Cache(6, 6)
    cache.queued("waits", cache.on_cpu("waits", 3 * CHUNK))
    cache.end_step()
    assert cache.manager.num_available() == 3
    cache.complete()
    assert cache.manager.num_available() == 6


def test_expedited_copies_count_as_complete():
    cache = Cache(6, 6)
    sequence = cache.queued("a", cache.on_cpu("a", 3 * CHUNK))
    cache.manager.try_admit(sequence, 3 * CHUNK, waive_reserve=True)
    _, ins = cache.begin()
    assert cache.manager.expedite(sequence) == tuple(copy.copy_id for copy in ins)
    assert resident(sequence) == [0, 1, 2] and cache.manager.expedite(sequence) == ()
    cache.check()


# Pushing out.


def test_pushed_out_chunks_take_no_slot_of_a_queued_request():
    """They displace idle chunks of any value; without any they are dropped."""
    cache = Cache(16, 5)
    away = cache.idle("away", 3 * CHUNK)
    idle = cache.on_cpu("idle", CHUNK, 0.5)
    waits = cache.queued("waits", cache.on_cpu("waits", 4 * CHUNK))
    assert waits.arrival > away.arrival
    assert cache.manager.push_out(away) == 3
    assert states(waits) == ["on cpu"] * 4 and states(idle) == []
    assert states(away) == ["leaving"] and len(cache.begin()[0]) == 1
    cache.check()


def test_at_most_the_requested_number_is_pushed_out():
    cache = Cache(12, 12)
    sequence = cache.idle("a", 3 * CHUNK)
    assert [cache.manager.push_out(sequence, number) for number in (0, 1)] == [0, 1]
    assert states(sequence) == ["leaving", "on gpu", "on gpu"]
    assert cache.manager.push_out(sequence) == 2
