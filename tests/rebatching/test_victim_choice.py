"""Which queries give up memory or a row for others: parked rows and the choice of victims, without a loop."""

from __future__ import annotations

import pytest

from pensieve_jax import SamplingParams
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.fitting import Fitting
from pensieve_jax.rebatching.launches import FreeRow, Launch, Park
from pensieve_jax.rebatching.parked_rows import ParkedRows
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.ring import Ring
from pensieve_jax.rebatching.ring_shapes import RingShapes

TOKEN_BYTES = 10
ROW_BYTES = 32 * TOKEN_BYTES


def query(serial: int, num_prompt: int = 20, priority: int = 0) -> Query:
    return Query(
        serial,
        [1] * num_prompt,
        SamplingParams(max_tokens=10, ignore_eos=True),
        seed=0,
        priority=priority,
        ending_ids=(),
        max_context_tokens=96,
        tokenizer=None,
    )


def ring_shapes(config: RebatchingConfig) -> RingShapes:
    return RingShapes(config, TOKEN_BYTES, 96)


def config(
    num_rows: int, *, num_host_rows: int = 0, insertion: str = "embed", lengths: tuple[int, ...] = (32, 96)
) -> RebatchingConfig:
    return RebatchingConfig(
        max_batch=4,
        kv_bytes=num_rows * ROW_BYTES,
        lengths=lengths,
        host_bytes=num_host_rows * ROW_BYTES,
        preemptive=True,
        insertion=insertion,
    )


def test_full_host_memory_keeps_queries_that_are_served_sooner():
    """Of the two that leave, one finds room because a query there is served even later."""
    of = config(6, num_host_rows=1)
    parked = ParkedRows(ring_shapes(of), of.host_bytes)
    late, sooner, soonest = query(3), query(2), query(1)
    launches: list[Launch] = []
    for one in (late, sooner, soonest):
        parked.put(one, 32)
    room = 3 * ROW_BYTES
    assert parked.make_room(ROW_BYTES, launches, room_bytes=room)
    assert launches == [Park(3, waits=False), Park(3, waits=True)] and late.location is KVLocation.HOST

    assert parked.make_room(2 * ROW_BYTES, launches, room_bytes=room)
    assert launches[2:] == [FreeRow(3), Park(2, waits=False), Park(2, waits=True)]
    assert (late.location, sooner.location, soonest.location) == (
        KVLocation.NOT_COMPUTED,
        KVLocation.HOST,
        KVLocation.DEVICE,
    )

    assert parked.make_room(3 * ROW_BYTES, launches, room_bytes=room)
    assert launches[5:] == [FreeRow(2), Park(1, waits=False), Park(1, waits=True)]

    parked.put(late, 32)
    assert parked.make_room(3 * ROW_BYTES, launches, room_bytes=room)
    assert (
        launches[8:] == [FreeRow(3)] and soonest.location is KVLocation.HOST
    )  # no query there is served later


def test_a_kept_row_is_not_dropped_from_host_memory():
    """This holds although it is served later than the query that would take its room."""
    of = config(6, num_host_rows=1)
    parked = ParkedRows(ring_shapes(of), of.host_bytes)
    kept, sooner = query(2), query(1)
    launches: list[Launch] = []
    for one in (kept, sooner):
        parked.put(one, 32)
    room = 2 * ROW_BYTES
    assert parked.make_room(ROW_BYTES, launches, room_bytes=room)
    assert kept.location is KVLocation.HOST and parked.host_bytes == of.host_bytes
    launches.clear()
    assert parked.make_room(2 * ROW_BYTES, launches, room_bytes=room, keep=kept)
    assert launches == [FreeRow(1)] and kept.location is KVLocation.HOST


@pytest.mark.parametrize(("priority", "is_spared"), [(1, True), (0, False)])
def test_rows_that_are_not_in_the_way_are_spared(priority, is_spared):
    """A prompt's columns come behind the longest row's: that row is in the way, a shorter one is not.

    But a less urgent one would continue while a more urgent one waits.
    """
    of = config(12, insertion="shape")
    ring: Ring[Query] = Ring()
    fitting = Fitting(of, ring_shapes(of), ring)
    long, short = query(1, priority=1), query(2, priority=priority)
    shape = ring_shapes(of).shape_for(60)
    assert shape is not None
    ring.resize(shape)
    for one, num_columns in ((short, 20), (long, 60)):
        ring.insert(one, num_columns)
    newcomer = query(3, num_prompt=50, priority=5)
    assert fitting.shape_with(newcomer) is None
    assert fitting.victims_for(newcomer) == ([long] if is_spared else [short, long])


def test_of_two_rows_that_could_be_spared_the_higher_ranked_stays():
    """Without the long row the new query makes the ring longer and narrower: one of two more must leave."""
    of = config(9, insertion="shape", lengths=(32, 64, 96))
    ring: Ring[Query] = Ring()
    fitting = Fitting(of, ring_shapes(of), ring)
    assert [shape.batch for shape in ring_shapes(of).shapes] == [4, 3, 2]
    later, sooner, long = query(3), query(2), query(1)
    shape = ring_shapes(of).shape_for(60)
    assert shape is not None
    ring.resize(shape)
    for one, num_columns in ((later, 30), (sooner, 30), (long, 60)):
        ring.insert(one, num_columns)
    newcomer = query(4, num_prompt=40, priority=5)
    assert fitting.victims_for(newcomer) == [later, long]
