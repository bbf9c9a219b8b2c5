"""What must be true between any two steps.

Owns: the invariants.
Does not know: how they are kept.
"""

from __future__ import annotations

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.lattice import Lattice
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import rank


def check_integrity(loop: RebatchingLoop, config: RebatchingConfig, lattice: Lattice) -> None:
    """Raise AssertionError for whatever is not as it should be."""
    scheduler = loop.scheduler
    ring, line, shelf = scheduler.ring, scheduler.line, scheduler.shelf
    if ring.shape is not None:
        assert ring.shape in lattice.shapes
        assert ring.span <= ring.shape.length, "a row is longer than the ring"
    beside = [size for query, size in shelf.sizes.items() if query.place is not KVLocation.HOST]
    ring_bytes = 0 if ring.shape is None else lattice.row_bytes(ring.shape.batch * ring.shape.length)
    assert loop.kv_bytes == ring_bytes + sum(beside) <= lattice.kv_bytes, "the budget is exceeded"
    assert shelf.host_bytes <= config.host_bytes, "the budget of host memory is exceeded"
    waiting = list(line)
    assert waiting == sorted(waiting, key=rank)
    assert all(query.place in _ON_SHELF for query in shelf.sizes)
    assert {query for query in waiting if query.place is not KVLocation.NOWHERE} == set(shelf.sizes)
    in_ring = [query for _, query in ring.held]
    assert len(set(in_ring)) == len(in_ring)
    for row, query in ring.held:
        assert query.row == row
        if query.place is KVLocation.RING:
            _check_row(loop, config, query)
        else:
            assert query.place is KVLocation.GONE and config.insertion == "none"
    known = {*waiting, *(query for query in in_ring if query.place is KVLocation.RING)}
    open_queries = set(loop.queries.values())
    assert known <= open_queries
    for query in open_queries - known:  # all of its tokens are launched, and not all have come
        assert query.place is KVLocation.GONE and query.is_launched and not query.done
    for query in open_queries:
        assert not query.done and len(query.token_ids) <= query.num_sampled <= query.max_num_tokens


_ON_SHELF = (KVLocation.DEVICE, KVLocation.LEAVING, KVLocation.HOST)


def _check_row(loop: RebatchingLoop, config: RebatchingConfig, query: Query) -> None:
    """It sees as many columns as it has tokens, each once."""
    ring = loop.scheduler.ring
    places = ring.places(query.row)
    assert len(places) == query.num_kv_tokens == len(set(places.tolist()))
    if config.insertion != "shape":
        assert len(places) == ring.row_span(query.row), "a hole"


def check_urgent_first(loop: RebatchingLoop, config: RebatchingConfig) -> None:
    """Behind a step: nothing runs that a more urgent query, ready to join, could take the place of."""
    scheduler = loop.scheduler
    if not config.preemptive or not len(scheduler.line):
        return
    head = scheduler.line.head
    if head.place in _ON_SHELF:
        assert scheduler._fitting.victims_for(head) is None, "a more urgent query waits"
