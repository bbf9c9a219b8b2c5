"""Invariants of a padded batch between any two steps.

Owns the invariants. Does not know how they are kept. Called by the scenarios and the tests of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.launches import Insert, Launch, Shape, Suspend
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import rank
from pensieve_jax.rebatching.ring_shapes import RingShapes


def check_integrity(loop: RebatchingLoop, config: RebatchingConfig, ring_shapes: RingShapes) -> None:
    """Raise AssertionError for the first violated invariant."""
    scheduler = loop.scheduler
    ring, queue, parked = scheduler.ring, scheduler.queue, scheduler.parked
    if ring.shape is not None:
        assert ring.shape in ring_shapes.shapes
        assert ring.span <= ring.shape.length, "a row is longer than the ring"
    beside = [size for query, size in parked.sizes.items() if query.location is not KVLocation.HOST]
    ring_bytes = 0 if ring.shape is None else ring_shapes.row_bytes(ring.shape.batch * ring.shape.length)
    assert loop.kv_bytes == ring_bytes + sum(beside) <= ring_shapes.kv_bytes, "the budget is exceeded"
    assert parked.host_bytes <= config.host_bytes, "the budget of host memory is exceeded"
    waiting = list(queue)
    assert waiting == sorted(waiting, key=rank)
    assert all(query.location in _PARKED for query in parked.sizes)
    assert {query for query in waiting if query.location is not KVLocation.NOT_COMPUTED} == set(parked.sizes)
    in_ring = [query for _, query in ring.held]
    assert len(set(in_ring)) == len(in_ring)
    for row, query in ring.held:
        assert query.row == row
        if query.location is KVLocation.RING:
            _check_row(loop, config, query)
        else:
            assert query.location is KVLocation.RELEASED and config.insertion == "none"
    known = {*waiting, *(query for query in in_ring if query.location is KVLocation.RING)}
    open_queries = set(loop.queries.values())
    assert known <= open_queries
    for query in open_queries - known:  # all of its tokens are launched, and not all have arrived
        assert query.location is KVLocation.RELEASED and query.is_launched and not query.done
    for query in open_queries:
        assert not query.done and len(query.token_ids) <= query.num_sampled <= query.max_num_tokens


_PARKED = (KVLocation.DEVICE, KVLocation.LEAVING, KVLocation.HOST)


def _check_row(loop: RebatchingLoop, config: RebatchingConfig, query: Query) -> None:
    """Assert that it sees as many columns as it has tokens, each once."""
    ring = loop.scheduler.ring
    places = ring.places(query.row)
    assert len(places) == query.num_kv_tokens == len(set(places.tolist()))
    if config.insertion != "shape":
        assert len(places) == ring.row_span(query.row), "a hole"


def check_urgent_first(loop: RebatchingLoop) -> None:
    """Assert, after a step's admission, that no query waits that could have joined.

    The first in the queue is either not ready, or does not fit even if all that it may preempt leave. Only a
    shaped step is closed to it: this step belongs to one prompt, which must rank before it. The rest of the
    step may change the first query, which then joins with the next step.
    """
    scheduler = loop.scheduler
    if not len(scheduler.queue):
        return
    head = min(scheduler.queue, key=rank)
    shaped = [launch.serial for launch in scheduler._launches if isinstance(launch, Shape)]
    if shaped:
        assert rank(loop.queries[shaped[0]]) < rank(head), "a prompt was shaped before a more urgent query"
    elif head.location in _PARKED:
        assert scheduler._fitting.victims_for(head) is None, "a more urgent query waits"
        assert scheduler._fitting.shape_with(head) is None, "a query waits that fits"


def check_preemption(loop: RebatchingLoop, victim: Query) -> None:
    """Assert, before admission suspends `victim`, that the first in the queue is more urgent."""
    head = min(loop.scheduler.queue, key=rank)
    assert head.priority > victim.priority, "an equal was preempted"


def check_return_order(loop: RebatchingLoop, launches: Sequence[Launch]) -> None:
    """Assert that no query joins, in program order, while a suspended one waits that ranks before it.

    A suspended query ranks before its equals that were never in the ring, so none of those takes its row.
    Once it is back, perhaps in the same step and without its holes, others may join beside it.
    """
    out: set[Query] = set()
    for launch in launches:
        if isinstance(launch, Suspend):
            out.add(loop.queries[launch.serial])
        elif isinstance(launch, Insert | Shape):
            query = loop.queries[launch.serial]
            out.discard(query)
            assert all(rank(query) < rank(victim) for victim in out), "a suspended query was passed"
