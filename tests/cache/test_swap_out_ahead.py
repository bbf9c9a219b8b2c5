"""Copying out ahead of need: when, which chunks, how many at once, and never twice."""

from __future__ import annotations

import pytest

from tests.cache.helpers import CHUNK, Cache, pages_of, resident, states


@pytest.mark.parametrize(("num_free", "num_copied"), [(6, 0), (5, 0), (4, 2), (2, 4)])
def test_idle_chunks_are_copied_out_while_too_few_pages_are_clean(num_free, num_copied):
    """Five of 12 pages should be clean; once fewer are, one more than is missing is copied."""
    cache = Cache(12, 12, clean_pages=5)
    sequence = cache.idle("a", (12 - num_free) * CHUNK)
    outs, ins = cache.end_step()
    assert len(outs) == num_copied and not ins
    assert states(sequence) == ["copying out"] * num_copied + ["on gpu"] * (12 - num_free - num_copied)
    assert [copy.page for copy in outs] == pages_of(sequence)[:num_copied], "the lowest valued first"
    assert cache.end_step() == ([], []), "one look is enough"
    cache.complete()
    assert states(sequence)[:num_copied] == ["on both"] * num_copied and cache.pool.num_free == num_free


def test_the_lowest_valued_of_all_conversations_are_copied_first():
    cache = Cache(12, 12, clean_pages=6)
    young, old = cache.idle("young", 4 * CHUNK, 1.0), cache.idle("old", 4 * CHUNK, 50.0)
    cache.end_step()
    assert states(old) == ["copying out"] * 3 + ["on gpu"] and states(young) == ["on gpu"] * 4


def test_running_and_queued_chunks_are_not_copied_ahead():
    cache = Cache(8, 8, clean_pages=8)
    cache.running("runs", 4 * CHUNK)
    cache.queued("waits", cache.idle("waits", 4 * CHUNK))
    assert cache.end_step() == ([], [])


@pytest.mark.parametrize("complete", [False, True])
def test_a_conversation_that_returns_before_its_pages_are_needed_copies_nothing(complete):
    cache = Cache(12, 12, clean_pages=12)
    sequence = cache.idle("a", 5 * CHUNK)
    pages = pages_of(sequence)
    assert len(cache.end_step()[0]) == 5
    if complete:
        cache.complete()
    cache.queued("a", sequence)
    cache.manager.begin_step()
    assert cache.manager.try_admit(sequence, 6 * CHUNK, waive_reserve=True)
    assert resident(sequence) == [0, 1, 2, 3, 4] and pages_of(sequence)[:5] == pages
    assert sequence.holes(CHUNK) == [] and cache.manager.take_copies() == ((), ())
    cache.check()


def test_a_full_chunk_is_never_copied_out_twice():
    """The chunk goes out, in, and out again: one copy out, one copy in."""
    cache = Cache(6, 12)
    sequence = cache.on_both("a", 3 * CHUNK)
    other = cache.running("other", 6 * CHUNK)
    assert states(sequence) == ["on cpu"] * 3 and cache.begin() == ([], [])
    cache.manager.truncate(other, 0)
    cache.manager.release(other)
    cache.queued("a", sequence)
    cache.manager.begin_step()
    assert cache.manager.try_admit(sequence, 3 * CHUNK, waive_reserve=True)
    assert len(cache.begin()[1]) == 3
    cache.complete()
    assert states(sequence) == ["on both"] * 3, "the copy in host memory stays"
    cache.manager.release(sequence)
    assert cache.end_step() == ([], [])
    cache.running("third", 6 * CHUNK)
    assert states(sequence) == ["on cpu"] * 3 and cache.begin() == ([], [])


def test_without_a_host_tier_nothing_is_copied():
    cache = Cache(6, 0, clean_pages=6)
    sequence = cache.idle("a", 5 * CHUNK)
    assert cache.end_step() == ([], [])
    cache.running("b", 4 * CHUNK)
    assert cache.begin() == ([], []) and states(sequence) == [
        "dropped",
        "dropped",
        "dropped",
        "on gpu",
        "on gpu",
    ]


def test_copies_in_flight_are_limited():
    cache = Cache(12, 12, clean_pages=12, max_num_copies=3)
    cache.idle("a", 8 * CHUNK)
    assert [len(cache.end_step()[0]) for _ in range(2)] == [3, 0]
    cache.complete(1)
    assert len(cache.end_step()[0]) == 1


@pytest.mark.parametrize(("num_free", "expected"), [(60, [16, 16, 16, 0]), (20, [46, 16, 16, 16])])
def test_few_are_copied_at_a_time_unless_more_than_half_is_missing(num_free, expected):
    """Of 200 pages 100 should be clean, and 16 more once they are not."""
    cache = Cache(200, 200, clean_pages=100)
    cache.idle("idle", (200 - num_free) * CHUNK)
    num_out = []
    for _ in expected:
        num_out.append(len(cache.end_step()[0]))
        cache.complete()
    assert num_out == expected


@pytest.mark.parametrize(("retrieval_priority", "num_copied"), [(True, 0), (False, 4)])
def test_nothing_is_copied_ahead_while_a_chunk_is_copied_in(retrieval_priority, num_copied):
    cache = Cache(12, 12, clean_pages=8, retrieval_priority=retrieval_priority)
    back = cache.queued("back", cache.on_cpu("back", 2 * CHUNK))
    cache.idle("idle", 6 * CHUNK)
    cache.manager.begin_step()
    assert cache.manager.try_admit(back, 2 * CHUNK, waive_reserve=True)
    cache.begin()
    assert len(cache.end_step()[0]) == (num_copied and 6)
    cache.complete(*cache.copies_in)
    assert len(cache.copies_out) == (num_copied and 6)
    assert len(cache.end_step()[0]) == 6 - (num_copied and 6)
