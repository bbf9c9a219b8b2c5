"""Every drop has its reason and the chunk's value."""

from __future__ import annotations

import math

from pensieve_jax.cache import ChunkDrop, DropReason
from tests.cache.helpers import CHUNK, Cache


def test_without_host_memory_a_page_is_freed_by_dropping():
    cache = Cache(4)
    old, _ = cache.idle("old", 2 * CHUNK, 100.0), cache.idle("young", 2 * CHUNK, 10.0)
    worth = cache.manager.worth_of(old, 0)
    cache.running("new", CHUNK)
    (drop,) = cache.manager.take_drops()
    assert drop == ChunkDrop("old", 0, DropReason.NO_HOST_MEMORY, worth) and 0 < worth < math.inf


def test_full_host_memory_drops_chunks_of_lower_value_than_the_new_one():
    cache = Cache(2, cpu_pages=1)
    cache.on_cpu("oldest", CHUNK, 1000.0)
    cache.idle("old", CHUNK, 100.0)
    cache.idle("young", CHUNK, 10.0)
    cache.running("new", CHUNK)
    drops = cache.manager.take_drops()
    assert [(drop.conversation_id, drop.reason) for drop in drops] == [("oldest", DropReason.SLOT_NEEDED)]


def test_full_host_memory_keeps_chunks_of_higher_value_than_the_new_one():
    cache = Cache(2, cpu_pages=1)
    cache.on_cpu("young", CHUNK, 1.0)
    cache.idle("old", CHUNK, 100.0)
    cache.idle("older", CHUNK, 200.0)
    cache.running("new", CHUNK)
    drops = cache.manager.take_drops()
    assert [(drop.conversation_id, drop.reason) for drop in drops] == [
        ("older", DropReason.HOST_MEMORY_WORTH_MORE)
    ]


def test_an_earlier_request_takes_the_slots_of_later_ones():
    """A queued request's chunks are worth more than idle ones, and than those of later arrivals."""
    cache = Cache(3, cpu_pages=1)
    early, late = cache.idle("early", CHUNK), cache.on_cpu("late", CHUNK)
    first = cache.queued("first")
    cache.queued("early", early)
    cache.queued("late", late)
    cache.manager.begin_step()
    assert cache.manager.try_admit(first, 3 * CHUNK, waive_reserve=True)
    assert cache.manager.take_drops() == (ChunkDrop("late", 0, DropReason.EARLIER_REQUEST, math.inf),)


def test_a_lost_device_drops_chunks_without_a_slot():
    cache = Cache(4, cpu_pages=2)
    cache.on_both("both", CHUNK)
    cache.idle("gpu", 2 * CHUNK)
    cache.manager.lose_device()
    assert cache.manager.take_drops() == tuple(
        ChunkDrop("gpu", index, DropReason.DEVICE_LOST, None) for index in (0, 1)
    )
