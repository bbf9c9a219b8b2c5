"""Baselines compute the same, in batches of whole requests; in virtual time they match the thesis."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pensieve_jax.cellular.cells import Cell, CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.errors import GraphError
from pensieve_jax.cellular.launches import Done
from pensieve_jax.cellular.loop import Loop
from pensieve_jax.cellular.request_processor import RequestProcessor
from pensieve_jax.cellular.tables import INITIAL
from pensieve_jax.core.errors import ConfigError
from pensieve_lab.cells.baselines import FixedGraph, GraphMerging, Padding
from pensieve_lab.cells.baselines.graph_merging import MergedGraphs
from pensieve_lab.cells.simulation import simulate
from pensieve_lab.cells.times import CellTimes
from tests.cellular.fake_worker import FakeWorker
from tests.cellular.hash_cells import Drawn, draw, make_cells
from tests.cellular.integrity import check_integrity
from tests.cellular.step_cell import STEP, chain
from tests.launching import load

NAMES = ("step", "decode", "leaf", "inner", "join", "narrow")
RIVALS = {
    "padding": (Padding, "ce"),
    "padding, oldest first": (functools.partial(Padding, oldest_first=True, width=4), "ce"),
    "merging by depth": (functools.partial(GraphMerging, order="depth", max_graphs=5), "ceta"),
    "merging by agenda": (functools.partial(GraphMerging, order="agenda", max_graphs=5), "ceta"),
}


def is_chain(drawn: Drawn) -> bool:
    """Return whether the model is a chain of cells whose requests return at their ends alone."""
    return all(node.inputs[0] == (i - 1 if i else None) for i, node in enumerate(drawn.nodes)) and (
        not drawn.returned or drawn.returned == [len(drawn.nodes) - 1]
    )


@pytest.mark.long
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_rivals_compute_the_same(name, num_workers):
    make_scheduler, shapes = RIVALS[name]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        types = CellTypes(make_cells({one: int(rng.choice([2, 5, 16])) for one in NAMES}))
        config = CellularConfig(num_devices=num_workers, num_rows=200)
        processor = RequestProcessor(types, config, make_scheduler)
        workers: list[FakeWorker] = []
        for _ in range(num_workers):
            FakeWorker(types, config.num_rows, workers)
        loop = Loop(processor, workers, 2)
        drawn = [draw(rng, shapes) for _ in range(20)]
        if "t" not in shapes:
            drawn = [one for one in drawn if is_chain(one)]
        open_requests = {}
        while drawn or open_requests:
            some, drawn = drawn[:4], drawn[4:]
            handles = processor.submit_many(some, lambda one, graph: one.unfold(graph))
            open_requests.update(zip(handles, some, strict=True))
            if open_requests and rng.random() < 0.2:
                handle = list(open_requests)[int(rng.integers(len(open_requests)))]
                if processor.cancel(handle):
                    del open_requests[handle]
            if rng.random() < 0.1:
                workers[0].fails = str(rng.choice(["intact", "lost"]))
            for worker in workers:
                worker.num_may_end = int(rng.integers(3))
            for handle in loop.step():
                if handle.error is not None:
                    open_requests.pop(handle, None)
                    continue
                states, tokens = open_requests.pop(handle).expected(types)
                output = handle.result()
                found = [int(next(one[key] for key in ("x", "y") if key in one)) for one in output.states]
                assert found == states
                assert list(output.emitted.get("token", ())) == tokens
            check_integrity(processor)


def test_figure_2_5_by_graphs():
    """Requests 1 to 4 end at 5, the length of the longest; 5 to 8 end at 12."""
    timeline = load("pensieve_lab.cells.timeline").run(
        functools.partial(Padding, width=100, oldest_first=True)
    )
    assert timeline.end_s.tolist() == [5, 5, 5, 5, 12, 12, 12, 12]


def test_buckets_are_padded_to_their_tops_in_turn():
    types = CellTypes([Cell(STEP, "step", 4)])
    served = simulate(
        types,
        chain,
        CellularConfig(),
        CellTimes({"step": {4: 1.0}}),
        [1, 11, 2, 12],
        np.array([0.0, 0.0, 0.1, 0.1]),
        functools.partial(Padding, width=10),
    )
    assert served.end_s.tolist() == [10, 30, 40, 30]


def test_a_graph_that_is_no_chain_cannot_be_padded():
    types = CellTypes(make_cells(dict.fromkeys(NAMES, 4)))
    processor = RequestProcessor(types, CellularConfig(num_rows=50), Padding)
    tree = next(one for one in (draw(np.random.default_rng(i), "t") for i in range(9)) if len(one.nodes) > 1)
    with pytest.raises(GraphError, match=r"requests\[0\] is 'a graph', but must be a chain"):
        processor.submit_many([tree], lambda one, graph: one.unfold(graph))
    assert not processor.handles and not processor.admission.request_ids


@pytest.mark.parametrize(
    ("options", "match"),
    [({"width": 0}, "width is 0"), ({"max_batch": 5}, "from 1 to 4"), ({"max_batch": 0}, "0")],
)
def test_padding_that_cannot_be(options, match):
    types = CellTypes([Cell(STEP, "step", 4)])
    with pytest.raises(ConfigError, match=match):
        RequestProcessor(types, CellularConfig(num_rows=50), functools.partial(Padding, **options))


def test_a_graph_that_is_not_that_of_the_others():
    types = CellTypes([Cell(STEP, "step", 4)])
    processor = RequestProcessor(types, CellularConfig(num_rows=50), FixedGraph)
    processor.submit_many([3, 3], chain)
    with pytest.raises(GraphError, match=r"requests\[1\].*the graph of the first request"):
        processor.submit_many([3, 4], chain)


def test_the_graph_of_a_request_that_was_refused_is_not_that_of_the_others():
    types = CellTypes([Cell(STEP, "step", 4)])
    processor = RequestProcessor(types, CellularConfig(num_rows=50), FixedGraph)
    with pytest.raises(GraphError, match=r"requests\[1\].*the graph of the first request"):
        processor.submit_many([3, 4], chain)
    assert len(processor.submit_many([4, 4], chain)) == 2


def test_an_order_of_merging_that_there_is_not():
    types = CellTypes([Cell(STEP, "step", 4)])
    with pytest.raises(ConfigError, match="'depth' or 'agenda'"):
        RequestProcessor(types, CellularConfig(num_rows=50), functools.partial(GraphMerging, order="x"))


def test_a_fixed_graph_runs_cell_by_cell():
    types = CellTypes([Cell(STEP, "step", 64)])
    served = simulate(
        types, chain, CellularConfig(), CellTimes({"step": {64: 1.0}}), [7] * 5, np.zeros(5), FixedGraph
    )
    assert served.end_s.tolist() == [7.0] * 5


@pytest.mark.parametrize("seed", range(12))
def test_merging_is_what_it_says(seed):
    """Heights are computed by recursion; an operator is all ready cells of the type that lies lowest."""
    rng = np.random.default_rng(seed)
    types = CellTypes(make_cells(dict.fromkeys(NAMES, 4)))
    processor = RequestProcessor(types, CellularConfig(num_rows=500), GraphMerging)
    drawn = [draw(rng, "ceta") for _ in range(int(rng.integers(1, 9)))]
    processor.submit_many(drawn, lambda one, graph: one.unfold(graph))
    table, ends = processor.nodes, processor.requests
    nodes = np.concatenate([np.arange(ends.start[i], ends.end[i]) for i in reversed(range(len(drawn)))])
    read = {
        node: [one for one in table.inputs[:, node].tolist() if one != INITIAL] for node in nodes.tolist()
    }

    @functools.cache
    def height(node):
        return 1 + max(map(height, read[node]), default=-1)

    merged = MergedGraphs(table, nodes)
    assert merged.heights.tolist() == [height(node) for node in nodes.tolist()]
    kind_of = dict(zip(nodes.tolist(), merged.kinds.tolist(), strict=True))
    heights = {}
    for node, kind in kind_of.items():
        heights.setdefault(kind, []).append(height(node))
    done = set()
    for kind, places in merged.by_agenda():
        ready = {node for node in read if node not in done and done.issuperset(read[node])}
        assert np.mean(heights[kind]) == min(np.mean(heights[kind_of[node]]) for node in ready)
        assert set(nodes[places].tolist()) == {node for node in ready if kind_of[node] == kind}
        done.update(nodes[places].tolist())
    assert done == set(read)
    by_depth = [(height(nodes[places[0]]), kind, len(places)) for kind, places in merged.by_depth()]
    assert by_depth == sorted(by_depth) and sum(one[2] for one in by_depth) == len(nodes)


def batches_of_four(**options):
    """Make a processor whose batches have one launch each."""
    types = CellTypes([Cell(STEP, "step", 4)])
    make = functools.partial(Padding, oldest_first=True)
    return RequestProcessor(types, CellularConfig(num_rows=50, **options), make)


def end(processor, launch):
    """Complete a launch; return the serials of the requests that it ends."""
    ended = processor.completed(Done(launch, states=[{} for _ in launch.reads]))
    return [one.serial for one in processor.scheduler.reportable(ended)]


def serials(processor, launch):
    return [processor.requests.serial[processor.nodes.request[task]].tolist() for task in launch.tasks]


def test_the_next_batch_is_planned_while_one_runs():
    """Only one batch is planned ahead, since an earlier choice would miss later requests."""
    processor = batches_of_four()
    processor.submit_many([2, 1, 2, 2] + [1] * 8, chain)
    first, second = processor.scheduler.schedule(0), processor.scheduler.schedule(0)
    assert serials(processor, first) == [[0, 1, 2, 3], [0, 2, 3]]
    assert serials(processor, second) == [[4, 5, 6, 7]]
    assert processor.scheduler.schedule(0) is None, "eleven wait for nothing"
    assert end(processor, first) == [1, 0, 2, 3]
    third = processor.scheduler.schedule(0)
    assert serials(processor, third) == [[8, 9, 10, 11]]
    assert end(processor, second) == [4, 5, 6, 7]
    assert end(processor, third) == [8, 9, 10, 11]
    check_integrity(processor)


def test_merging_plans_ahead_too():
    types = CellTypes([Cell(STEP, "step", 4)])
    make = functools.partial(GraphMerging, max_graphs=2)
    processor = RequestProcessor(types, CellularConfig(num_rows=50), make)
    processor.submit_many([2, 1, 1, 1], chain)
    launches = [processor.scheduler.schedule(0) for _ in range(3)]
    assert launches[2] is None
    assert [serials(processor, launch) for launch in launches[:2]] == [[[0, 1], [0]], [[2, 3]]]
    assert [end(processor, launch) for launch in launches[:2]] == [[1, 0], [2, 3]]


def test_a_batch_does_not_run_a_request_with_the_ids_of_a_cancelled_one():
    processor = batches_of_four(max_num_tasks=1)
    (cancelled,) = processor.submit_many([3], chain)
    processor.submit_many([3], chain)
    end(processor, processor.scheduler.schedule(0))
    assert processor.cancel(cancelled)
    processor.submit_many([3], chain)
    begun = [serials(processor, launch) for launch in run(processor)]
    assert begun == [[[1]], [[1]], [[2]], [[2]], [[2]]]
    assert not processor.handles and not processor.admission.request_ids


def test_waiting_requests_are_served_if_all_before_them_were_cancelled():
    processor = batches_of_four()
    handles = processor.submit_many([1] * 5, chain)
    assert all(processor.cancel(one) for one in handles[:4])
    assert [serials(processor, launch) for launch in run(processor)] == [[[4]]]


def run(processor):
    """Yield launches and complete them in sequence until none is left."""
    while (launch := processor.scheduler.schedule(0)) is not None:
        yield launch
        end(processor, launch)
