"""The pages of earlier requests, and whether another one has room beside them."""

from __future__ import annotations

import pytest

from tests.cache.helpers import CHUNK, Cache


@pytest.mark.parametrize(("num_chunks", "has_room"), [(4, True), (5, False)])
def test_a_request_has_room_beside_running_pages_and_the_reserve(num_chunks, has_room):
    """Of ten pages four run, written or not, and two are the reserve."""
    cache = Cache(10, reserve_pages=2)
    runs = cache.running("runs", 3 * CHUNK)
    assert cache.manager.grow(runs, 3 * CHUNK + 1)
    cache.idle("idle", 5 * CHUNK)
    pages = cache.manager.earlier_pages()
    pages.add_running(runs)
    assert pages.leave_room(cache.queued("asks"), num_chunks * CHUNK) is has_room


def test_without_a_running_request_the_reserve_is_waived():
    cache = Cache(10, reserve_pages=2)
    pages, asks = cache.manager.earlier_pages(), cache.queued("asks")
    assert pages.leave_room(asks, 10 * CHUNK) and not pages.leave_room(asks, 10 * CHUNK + 1)
    pages.add_queued(cache.queued("waits", cache.idle("waits", 3 * CHUNK)))
    assert pages.leave_room(asks, 7 * CHUNK) and not pages.leave_room(asks, 7 * CHUNK + 1)


def test_a_queued_sequence_keeps_its_pages_and_those_that_are_being_copied_to():
    cache = Cache(10, 10, max_num_copies=2)
    waits = cache.queued("waits", cache.on_cpu("waits", 5 * CHUNK, but=[0]))
    cache.end_step()
    assert [chunk.state.value for chunk in waits.chunks] == ["on gpu", *["copying in"] * 2, *["on cpu"] * 2]
    pages, asks = cache.manager.earlier_pages(), cache.queued("asks")
    pages.add_queued(waits)
    assert pages.leave_room(asks, 7 * CHUNK) and not pages.leave_room(asks, 8 * CHUNK)


def test_the_chunks_that_a_request_has_count_even_if_they_are_more_than_its_tokens_need():
    cache = Cache(4)
    asks = cache.queued("asks", cache.idle("asks", 4 * CHUNK))
    pages = cache.manager.earlier_pages()
    assert pages.leave_room(asks, 1)
    pages.add_queued(cache.queued("waits"))
    cache.manager.truncate(asks, CHUNK)
    runs = cache.running("runs", CHUNK)
    pages.add_running(runs)
    assert pages.leave_room(asks, 3 * CHUNK) and not pages.leave_room(asks, 3 * CHUNK + 1)


def test_pages_of_shared_chunks_count_once():
    """Two forks of `source` run: their trunk has three pages, and each of the three its own."""
    cache = Cache(12)
    source = cache.idle("source", 4 * CHUNK)
    forks = [cache.manager.fork(source, 3 * CHUNK, name) for name in ("one", "two", "three")]
    inner = cache.manager.fork(forks[0], 2 * CHUNK, "inner")
    for fork in forks[:2]:
        cache.running("", 4 * CHUNK, fork)
    pages = cache.manager.earlier_pages()
    for fork in forks[:2]:
        pages.add_running(fork)
    for asks, num_shared in ((cache.queued("three", forks[2]), 3), (cache.queued("inner", inner), 2)):
        assert asks.num_shared == num_shared
        room = (12 - 5 + num_shared) * CHUNK
        assert pages.leave_room(asks, room) and not pages.leave_room(asks, room + 1)
    alone = cache.manager.earlier_pages()
    alone.add_running(source)
    assert not alone.leave_room(cache.queued("new"), 9 * CHUNK), (
        "a trunk that only later ones run is not free"
    )
