"""Invariants of a cellular engine between any two events.

Owns the invariants. Does not know how they are kept. Called by the scenarios and the tests of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.request_processor import RequestProcessor
from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_jax.cellular.tables import DROPPED, INITIAL, SUBMITTED, WAITING


def check_integrity(processor: RequestProcessor) -> None:
    """Raise AssertionError for the first violated invariant."""
    _check_rows(processor)
    _check_nodes(processor)
    _check_subgraphs(processor)
    if isinstance(processor.scheduler, CellScheduler):  # baselines keep no cells, but whole requests
        _check_queues(processor, processor.scheduler)


def check_work_conserving(processor: RequestProcessor, idle: list[int]) -> None:
    """Assert that none of these idle workers could be given a cell."""
    assert isinstance(processor.scheduler, CellScheduler), "rivals leave workers idle"
    for worker in idle:
        for queue in processor.scheduler.queues:
            assert not queue.count(worker), f"worker {worker} is idle while cells are ready for it"


def check_pins(processor: RequestProcessor, in_flight: Iterable[Launch]) -> None:
    """Assert that a subgraph with nodes in flight is on one worker, to which it is pinned."""
    for launch in in_flight:
        for task in launch.tasks:
            pinned = processor.subgraphs.pinned[processor.nodes.sub[task]]
            assert (pinned == launch.worker).all(), "a subgraph is on two workers"
            assert len(task) <= launch.kind.max_batch and len(task), "a task is empty, or too large"


def _check_rows(processor: RequestProcessor) -> None:
    """Assert that a row is free or has one owner, and that requests hold no more rows than promised."""
    nodes, formation = processor.nodes, processor.formation
    budget = processor.admission.budget
    held = np.flatnonzero(nodes.row >= 0)
    held = held[held != INITIAL]
    states = np.array([one.state_kind for one in processor.types.types])[nodes.kind[held]]
    for worker, by_kind in enumerate(formation.rows):
        for kind, rows in enumerate(by_kind):
            mine = held[(nodes.worker[held] == worker) & (states == kind)]
            everything = np.concatenate([rows.free_rows(), nodes.row[mine]])
            assert len(np.unique(everything)) == len(everything), f"a row of worker {worker} is had twice"
            assert len(everything) == budget.num_rows, f"a row of worker {worker} is lost"
    admitted = set(processor.admission.request_ids) - set(processor.admission.waiting.values.tolist())
    known = np.array(sorted(admitted), np.int64)
    num_kinds = len(processor.types.kinds)
    per_kind = np.bincount(
        nodes.request[held] * num_kinds + states, minlength=processor.requests.capacity * num_kinds
    )
    holds = per_kind.reshape(-1, num_kinds)[known]
    needed = processor.requests.rows[:, known].T
    assert (holds <= needed).all(), f"a request holds more rows than it was promised: {holds} of {needed}"
    promised = needed.sum(axis=0)
    assert (promised == budget.promised).all(), "promises are not those of the requests that were admitted"
    assert (budget.promised <= budget.num_rows).all()


def _check_nodes(processor: RequestProcessor) -> None:
    """Assert that a node was submitted after its inputs, and that its pending readers are counted."""
    nodes = processor.nodes
    ids = _nodes_of(processor, processor.handles.keys() - processor.restarting)
    inputs, state = nodes.inputs[:, ids], nodes.state[ids]
    is_read = inputs != INITIAL
    source = nodes.state[inputs]
    begun = (state != WAITING) & (state != DROPPED)
    assert not (begun & is_read & (source == WAITING)).any(), "a node was submitted before its input"
    inner = is_read & (nodes.sub[inputs] == nodes.sub[ids])
    waits = (inner & (source == WAITING)).sum(axis=0)
    assert (waits[state == WAITING] == nodes.waits[ids][state == WAITING]).all(), "waits are miscounted"
    readers = inputs[:, state == WAITING]
    uses = np.bincount(readers[readers != INITIAL], minlength=nodes.capacity)[ids]
    uses += (nodes.returned[ids] >= 0) & (state == WAITING)
    alive = state != DROPPED
    assert (uses[alive] == nodes.uses[ids][alive]).all(), "uses are miscounted"
    submitted = begun & alive
    is_kept = nodes.row[ids] >= 0
    assert (is_kept == (submitted & (uses > 0)))[alive].all(), "a row is held without a user, or lost"


def _check_subgraphs(processor: RequestProcessor) -> None:
    """Assert that exactly subgraphs with nodes in flight are pinned, and the counts of unfinished nodes."""
    nodes, table, requests = processor.nodes, processor.subgraphs, processor.requests
    known = processor.admission.request_ids
    subs = _all_of(requests.sub_start, requests.sub_end, known)
    ids = _nodes_of(processor, known)
    assert ((table.in_flight[subs] > 0) == (table.pinned[subs] >= 0)).all(), "a pin is wrong"
    own, state = nodes.sub[ids], nodes.state[ids]
    waiting = np.bincount(own[state == WAITING], minlength=table.capacity)[subs]
    assert (waiting == table.unsubmitted[subs]).all(), "unsubmitted nodes are miscounted"
    flying = np.bincount(own[state == SUBMITTED], minlength=table.capacity)[subs]
    assert (flying == table.in_flight[subs] - table.waste[subs]).all(), "nodes in flight are miscounted"


def _check_queues(processor: RequestProcessor, scheduler: CellScheduler) -> None:
    """Assert that a ready node is in its queue once, in the order of release."""
    nodes, table = processor.nodes, processor.subgraphs
    queued = [queue.all_nodes() for queue in scheduler.queues]
    for kind, ids in enumerate(queued):
        assert (nodes.kind[ids] == kind).all(), "a node stands in the queue of another type"
        assert (np.diff(table.seq[nodes.sub[ids]]) >= 0).all(), "the order of release is broken"
    ids = _nodes_of(processor, processor.admission.request_ids)
    is_ready = (nodes.state[ids] == WAITING) & (nodes.waits[ids] == 0) & (table.seq[nodes.sub[ids]] >= 0)
    found, expected = np.sort(np.concatenate(queued)), np.sort(ids[is_ready])  # ids, each once
    assert np.array_equal(found, expected), "what is ready is not what is queued"


def _nodes_of(processor: RequestProcessor, requests: Iterable[int]) -> np.ndarray:
    return _all_of(processor.requests.start, processor.requests.end, requests)


def _all_of(starts: np.ndarray, ends: np.ndarray, requests: Iterable[int]) -> np.ndarray:
    """Return the ids that belong to these requests, or an empty array."""
    ranges = [np.arange(starts[one], ends[one]) for one in requests]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)
