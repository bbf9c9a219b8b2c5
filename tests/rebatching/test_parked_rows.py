"""Parked rows beside the ring: budgets to the exact byte, and the order in which rows leave."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pensieve_jax.rebatching.launches import FreeRow, Launch, Park, Return
from pensieve_jax.rebatching.parked_rows import ParkedRows
from pensieve_jax.rebatching.query import KVLocation, Query
from tests.rebatching.small_queries import ROW_BYTES, query, ring_shapes_of


def parked_of(queries: Sequence[Query], *, num_host_rows: int = 9, room: int = 8) -> ParkedRows:
    """Make parked rows with room for `room` rows; each query has a row of 32 columns."""
    _, ring_shapes = ring_shapes_of(8)
    parked = ParkedRows(ring_shapes, num_host_rows * ROW_BYTES)
    for one in queries:
        parked.put(one, 32)
    parked.room_bytes = room * ROW_BYTES
    return parked


def test_room_is_counted_to_the_last_byte():
    parked = parked_of([query(1)], room=3)
    assert parked.has_room(2 * ROW_BYTES) and not parked.has_room(2 * ROW_BYTES + 1)
    assert (parked.device_bytes, parked.host_bytes) == (ROW_BYTES, 0)
    assert parked.kv_bytes == (8 - 3 + 1) * ROW_BYTES, "the ring takes the rest of the memory"


def test_the_peak_number_of_bytes_is_recorded():
    first, second = query(1), query(2)
    parked = parked_of([first, second])
    assert parked.max_kv_bytes == 2 * ROW_BYTES
    parked.take(first)
    parked.note()
    assert parked.kv_bytes == ROW_BYTES and parked.max_kv_bytes == 2 * ROW_BYTES


@pytest.mark.parametrize(("num_rows", "serials"), [(1, []), (2, [5]), (3, [5, 4]), (4, [5, 4])])
def test_queries_that_are_served_sooner_do_not_leave_ahead_of_need(num_rows, serials):
    """They would have to come back at once; those that are served last leave first."""
    rows = [query(1), query(2), query(4), query(5)]
    parked = parked_of(rows, room=5)
    launches: list[Launch] = []
    parked.begin_to_make_room(num_rows * ROW_BYTES, query(3), launches)
    assert launches == [Park(serial, waits=False) for serial in serials]
    assert [one.location for one in rows[:2]] == [KVLocation.DEVICE, KVLocation.DEVICE]


def test_the_row_of_a_new_query_does_not_leave_for_it():
    newcomer = query(3)
    parked = parked_of([newcomer], room=1)
    launches: list[Launch] = []
    parked.begin_to_make_room(ROW_BYTES, newcomer, launches)
    assert not launches and newcomer.location is KVLocation.DEVICE


@pytest.mark.parametrize(("num_host_rows", "serials"), [(0, []), (1, [5]), (2, [5, 4]), (3, [5, 4])])
def test_a_row_that_leaves_ahead_of_need_needs_host_memory(num_host_rows, serials):
    """It leaves only if there is room: what could be computed ahead can also be computed later."""
    parked = parked_of([query(4), query(5)], room=2, num_host_rows=num_host_rows)
    launches: list[Launch] = []
    parked.begin_to_make_room(2 * ROW_BYTES, query(3), launches)
    assert launches == [Park(serial, waits=False) for serial in serials]
    assert len(parked) == 2


def test_a_row_that_leaves_takes_both_memories_until_its_copy_is_done():
    one, other = query(1), query(2)
    parked = parked_of([one, other], room=2)
    launches: list[Launch] = []
    parked.begin_to_make_room(ROW_BYTES, query(0), launches)
    assert other.location is KVLocation.LEAVING
    assert (parked.device_bytes, parked.host_bytes) == (2 * ROW_BYTES, ROW_BYTES)
    parked.settle(lambda serial: False)
    assert other.location is KVLocation.LEAVING
    parked.settle(lambda serial: True)
    assert other.location is KVLocation.HOST and one.location is KVLocation.DEVICE
    assert (parked.device_bytes, parked.host_bytes) == (ROW_BYTES, ROW_BYTES)


def test_a_row_comes_back():
    one = query(1)
    parked = parked_of([one])
    one.location = KVLocation.HOST
    launches: list[Launch] = []
    parked.bring(one, launches)
    assert launches == [Return(1)] and one.location is KVLocation.DEVICE
    assert (parked.device_bytes, parked.host_bytes) == (ROW_BYTES, 0)


@pytest.mark.parametrize(("num_rows", "waits"), [(1, []), (2, [2]), (3, [1, 2])])
def test_the_loop_waits_for_room_that_is_needed_now(num_rows, waits):
    """As many rows leave as are needed, and the loop waits for each."""
    parked = parked_of([query(1), query(2)], room=3)
    launches: list[Launch] = []
    assert parked.make_room(num_rows * ROW_BYTES, launches)
    assert sorted(one.serial for one in launches if isinstance(one, Park) and one.waits) == waits
    assert len(launches) == 2 * len(waits)


def test_the_loop_waits_for_leaving_rows_first():
    """No other row leaves if that suffices."""
    leaving, other = query(1), query(2)
    parked = parked_of([leaving, other], room=2)
    leaving.location = KVLocation.LEAVING
    launches: list[Launch] = []
    assert parked.make_room(ROW_BYTES, launches)
    assert launches == [Park(1, waits=True)] and other.location is KVLocation.DEVICE


@pytest.mark.parametrize("place", [KVLocation.DEVICE, KVLocation.LEAVING])
def test_a_row_to_keep_stays_and_counts(place):
    """Other rows leave instead. If that does not suffice, `make_room` returns False."""
    kept, other = query(2), query(1)
    parked = parked_of([kept, other], room=2)
    kept.location = place
    launches: list[Launch] = []
    assert parked.make_room(ROW_BYTES, launches, keep=kept)
    assert launches == [Park(1, waits=False), Park(1, waits=True)] and kept.location is place
    assert not parked.make_room(2 * ROW_BYTES, launches, keep=kept)


def test_room_is_made_for_a_ring_of_another_size():
    """`room_bytes` is the room beside the next ring."""
    parked = parked_of([query(1), query(2)], room=3)
    launches: list[Launch] = []
    assert parked.make_room(0, launches, room_bytes=ROW_BYTES)
    assert launches == [Park(2, waits=False), Park(2, waits=True)]
    parked.room_bytes = ROW_BYTES
    assert parked.make_room(0, launches, room_bytes=8 * ROW_BYTES) and len(launches) == 2


def test_as_few_rows_as_needed_are_dropped_from_host_memory():
    """The row served last goes first, and only rows served after the new query go."""
    there = [query(serial) for serial in (2, 4, 5)]
    newcomer = query(3)
    parked = parked_of([*there, newcomer], num_host_rows=3, room=1)
    for one in there:
        one.location = KVLocation.HOST
    launches: list[Launch] = []
    assert parked.make_room(ROW_BYTES, launches)
    assert launches == [FreeRow(5), Park(3, waits=False), Park(3, waits=True)]
    assert [one.location for one in there] == [KVLocation.HOST, KVLocation.HOST, KVLocation.NOT_COMPUTED]


def test_a_dropped_row_is_no_longer_parked():
    one = query(1)
    parked = parked_of([one])
    launches: list[Launch] = []
    parked.drop(one, launches)
    assert launches == [FreeRow(1)] and one.location is KVLocation.NOT_COMPUTED and not len(parked)
