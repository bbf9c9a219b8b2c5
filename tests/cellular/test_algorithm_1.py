"""Algorithm 1 of the thesis, line by line: the chosen type, and the tasks of a launch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from pensieve_jax.cellular.cells import Cell, CellTypes, Int
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.launches import Done, Launch
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.request_processor import RequestProcessor
from pensieve_jax.cellular.scheduler import CellScheduler
from tests.cellular.integrity import check_integrity
from tests.cellular.step_cell import Step


class Leaf:
    """Cell without inputs. Each of its nodes is a subgraph of its own, and not a chain."""

    state: ClassVar = Step.state
    inputs = ()


class Pair:
    """Cell that reads two nodes of its own type."""

    state: ClassVar = {"y": Int()}
    inputs: ClassVar = (state, state)


class Bench:
    """A scheduler and its tables, without a device: the test launches and completes by hand.

    Attributes:
        processor: the tables, which also complete launches.
        scheduler: the one under test.
    """

    def __init__(self, priorities: dict[str, int] | None = None, max_batch: int = 4, **config: Any) -> None:
        self.modules: dict[str, Any] = {
            name: Leaf() if name == "leaf" else Pair() if name == "pair" else Step()
            for name in priorities or {"low": 0, "high": 1}
        }
        ranks = priorities or {"low": 0, "high": 1}
        types = CellTypes([Cell(one, name, max_batch, ranks[name]) for name, one in self.modules.items()])
        options = {"tie_break": "priority", "max_num_tasks": 1, "num_rows": 100, **config}
        self.processor = RequestProcessor(types, CellularConfig(**options))
        assert isinstance(self.processor.scheduler, CellScheduler)
        self.scheduler = self.processor.scheduler

    def chains(self, name: str, *lengths: int) -> list[CellRequest]:
        """Submit one request per length: a chain of that length, all cells of one type."""

        def unfold(num: int, graph: Any) -> None:
            graph.returns(graph.chain(self.modules[name], [0] * num)[-1])

        return self.processor.submit_many(lengths, unfold)

    def leaves(self, num: int) -> None:
        """Submit one request of `num` independent cells."""
        self.processor.submit_many(
            [num], lambda num, graph: graph.returns(*(graph.add("leaf") for _ in range(num)))
        )

    def next(self, worker: int = 0) -> Launch | None:
        """Launch what the scheduler chooses."""
        launch = self.scheduler.schedule(worker)
        if launch is not None:
            self.processor.launched(launch)
        check_integrity(self.processor)
        return launch

    def name(self, worker: int = 0) -> str:
        """Launch what the scheduler chooses; returns the name of its type, or "" for nothing."""
        launch = self.next(worker)
        return "" if launch is None else launch.kind.name

    def sizes(self, worker: int = 0) -> list[int]:
        """Launch what the scheduler chooses; returns the size of each task."""
        launch = self.next(worker)
        assert launch is not None
        return [len(task) for task in launch.tasks]

    def requests(self, worker: int = 0) -> list[list[int]]:
        """Launch what the scheduler chooses; returns the serials of each task's requests."""
        launch = self.next(worker)
        assert launch is not None
        return serials(self.processor, launch)

    def complete(self, launch: Launch | None) -> None:
        assert launch is not None
        self.processor.completed(Done(launch, states=[{} for _ in launch.reads]))
        check_integrity(self.processor)


def serials(processor: RequestProcessor, launch: Launch) -> list[list[int]]:
    """For each task the serials of its cells' requests."""
    return [processor.requests.serial[processor.nodes.request[task]].tolist() for task in launch.tasks]


# Lines 5 to 10: the type.


@pytest.mark.parametrize(("num", "chosen"), [(3, "high"), (4, "low"), (5, "low")])
def test_line_5_a_full_batch_goes_first(num, chosen):
    """Criterion (a): exactly the largest batch is enough, one less is not."""
    bench = Bench()
    bench.chains("low", *[1] * num)
    bench.chains("high", 1, 1, 1)
    assert bench.name() == chosen


def test_line_5_a_full_batch_goes_first_though_its_type_runs():
    """Criterion (a) is looked at before (b)."""
    bench = Bench()
    bench.chains("low", *[2] * 4)
    assert bench.name() == "low"
    bench.chains("high", 1)
    assert bench.name() == "low"


def test_line_5_of_full_batches_the_highest_priority_goes_first():
    bench = Bench()
    bench.chains("low", *[1] * 4)
    bench.chains("high", *[1] * 4)
    assert [bench.name(), bench.name(), bench.name()] == ["high", "low", ""]


def test_line_5_a_type_has_its_own_largest_batch():
    """The thesis has one set of sizes, this engine one for each type."""
    types = CellTypes([Cell(Step(), "low", 2), Cell(Step(), "high", 4, priority=1)])
    processor = RequestProcessor(types, CellularConfig(tie_break="priority", num_rows=10))
    for name, num in (("high", 3), ("low", 2)):
        processor.submit_many([1] * num, lambda _, graph, name=name: graph.returns(*graph.chain(name, [0])))
    launch = processor.scheduler.schedule(0)
    assert launch is not None and launch.kind.name == "low"


def test_line_7_a_type_without_running_tasks_goes_before_one_with():
    """Criterion (b), whatever the priorities."""
    bench = Bench()
    bench.chains("high", 3, 3)
    bench.chains("low", 1)
    assert [bench.name(), bench.name(), bench.name()] == ["high", "low", "high"]


def test_line_7_tasks_run_until_they_complete():
    """Behind its completion the type is idle again, so its priority counts."""
    bench = Bench(max_num_tasks=2)
    bench.chains("high", 9, 9)
    first = bench.next()
    assert first is not None and len(first.tasks) == 2
    assert bench.scheduler.num_running.tolist() == [0, 2]
    bench.complete(first)
    assert bench.scheduler.num_running.tolist() == [0, 0]
    bench.chains("low", 1)
    assert [bench.name(), bench.name()] == ["high", "low"]


def test_line_7_a_type_with_one_of_two_launches_complete_still_runs():
    bench = Bench()
    bench.chains("high", 9)
    first = bench.next()
    bench.next()
    bench.complete(first)
    bench.chains("low", 1)
    assert bench.name() == "low"


def test_line_9_where_all_types_run_the_highest_priority_goes_first():
    """Criterion (c) applies where (a) and (b) find no type."""
    bench = Bench()
    bench.chains("low", 9)
    bench.chains("high", 2)
    assert [bench.name() for _ in range(4)] == ["high", "low", "high", "low"]


def test_nothing_is_ready():
    bench = Bench()
    assert bench.next() is None
    bench.chains("low", 1)
    assert bench.name() == "low" and bench.next() is None


def test_line_10_of_equal_priorities_the_first_registered_goes_first():
    bench = Bench({"b": 1, "a": 1})
    bench.chains("a", 1)
    bench.chains("b", 1)
    assert [bench.name(), bench.name()] == ["b", "a"]


def test_types_alternate_on_one_device():
    """Of types of one criterion the one that was launched the longest ago; at first the highest priority."""
    bench = Bench({"x": 0, "y": 2, "z": 1}, tie_break="alternate")
    for name in "xyz":
        bench.chains(name, *[9] * 4)
    assert [bench.name() for _ in range(7)] == ["y", "z", "x", "y", "z", "x", "y"]


@pytest.mark.parametrize(
    ("num_devices", "names"), [(1, ["high", "low", "high", "low"]), (2, ["high", "high", "high", "high"])]
)
def test_the_default_tie_break_alternates_on_one_device_alone(num_devices, names):
    bench = Bench(tie_break=None, num_devices=num_devices)
    for name in ("high", "low"):
        bench.chains(name, *[9] * 4)
    assert [bench.name() for _ in range(4)] == names


@pytest.mark.parametrize(("max_skips", "num_before"), [(None, 8), (1, 1), (3, 3)])
def test_a_ready_type_is_skipped_so_often_at_most(max_skips, num_before):
    """Each launch of another type counts, and the type's own launch begins the count anew."""
    bench = Bench(max_skips=max_skips)
    bench.chains("high", *[20] * 4)
    bench.chains("low", 9)
    names = [bench.name() for _ in range(8)]
    expected = (["high"] * num_before + ["low"]) * 8
    assert names == expected[:8]


def test_a_type_that_is_not_ready_is_not_skipped():
    """The count begins when it has ready cells."""
    bench = Bench(max_skips=2)
    bench.chains("high", *[20] * 4)
    bench.name()
    bench.name()
    bench.chains("low", 1)
    assert [bench.name() for _ in range(4)] == ["high", "high", "low", "high"]
    bench.chains("low", 1)
    assert [bench.name() for _ in range(3)] == ["high", "high", "low"]


def test_a_type_that_is_pinned_elsewhere_is_not_skipped():
    """Its cells are not ready for the worker that launches others."""
    bench = Bench(max_skips=1, num_devices=2)
    bench.chains("low", 9)
    assert bench.name(0) == "low"
    bench.chains("high", *[20] * 8)
    assert [bench.name(1), bench.name(1)] == ["high", "high"]
    assert [bench.name(0), bench.name(0)] == ["high", "low"]


def test_the_longest_overdue_goes_first():
    """Two that are never full: by priority one of them would starve the other."""
    bench = Bench({"busy": 0, "a": 1, "b": 2}, max_skips=1)
    bench.chains("busy", *[30] * 4)
    bench.chains("a", 9)
    bench.chains("b", 9)
    assert [bench.name() for _ in range(9)] == ["busy", "a", "b"] * 3


# Lines 14 to 24: the tasks of a launch.


@pytest.mark.parametrize(("length", "num_tasks"), [(1, 1), (4, 4), (5, 5), (6, 5)])
def test_line_14_a_launch_has_so_many_tasks_at_most(length, num_tasks):
    bench = Bench(max_num_tasks=5)
    bench.chains("low", length)
    assert bench.sizes() == [1] * num_tasks
    assert bench.name() == ("low" if length > num_tasks else "")


def test_line_14_for_cells_that_make_no_chains():
    bench = Bench({"leaf": 0}, max_num_tasks=2)
    bench.leaves(9)
    assert bench.sizes() == [4, 4] and bench.sizes() == [1]


@pytest.mark.parametrize(
    ("min_batch", "num", "sizes"),
    [(1, 5, [[4, 1]]), (2, 5, [[4], [1]]), (2, 6, [[4, 2]]), (3, 6, [[4], [2]]), (2, 1, [[1]])],
)
@pytest.mark.parametrize("kind", ["leaf", "chain"])
def test_line_16_a_task_below_the_least_batch_ends_the_launch(kind, min_batch, num, sizes):
    """Only the first task of a launch may be smaller: else a few cells would wait for others for ever."""
    bench = Bench({kind: 0}, min_batch=min_batch, max_num_tasks=5)
    if kind == "leaf":
        bench.leaves(num)
    else:
        bench.chains(kind, *[1] * num)
    assert [bench.sizes() for _ in sizes] == sizes
    assert bench.next() is None


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [((3, 3, 1), [3, 2, 2]), ((3, 2, 1), [3, 2]), ((5, 1, 1), [3]), ((9, 9), [2, 2, 2, 2, 2])],
)
def test_line_16_as_chains_end(lengths, sizes):
    """The least batch counts those that go on and those that join."""
    bench = Bench(min_batch=2, max_num_tasks=5)
    bench.chains("low", *lengths)
    assert bench.sizes() == sizes


def test_line_18_nodes_that_follow_are_ready_for_the_next_task():
    """A chain that ends makes room for the next one in line, within a launch."""
    bench = Bench(max_batch=2, max_num_tasks=4)
    bench.chains("low", 1, 3, 2, 1)
    assert bench.requests() == [[0, 1], [1, 2], [1, 2], [3]]


def test_line_18_for_cells_that_make_no_chains():
    """A node that reads two is ready behind the last of them."""
    bench = Bench({"pair": 0}, max_num_tasks=3)

    def unfold(_: int, graph: Any) -> None:
        left, right = (graph.add("pair", (None, None)) for _ in range(2))
        graph.returns(graph.add("pair", (left, right)))

    bench.processor.submit_many([0], unfold)
    assert bench.sizes() == [2, 1]


def test_line_21_a_subgraph_stays_with_its_worker_while_it_runs():
    bench = Bench(num_devices=2)
    bench.chains("low", 3)
    first = bench.next(0)
    assert bench.next(1) is None, "it runs on worker 0"
    second = bench.next(0)
    bench.complete(first)
    assert bench.next(1) is None, "one of its two tasks runs on worker 0"
    bench.complete(second)
    assert bench.name(1) == "low"


def test_line_5_does_not_count_nodes_that_are_pinned_to_another_worker():
    """Or the task of a full batch could be empty."""
    bench = Bench(num_devices=2)
    bench.chains("low", *[2] * 4)
    bench.chains("high", 1)
    assert bench.name(0) == "low"
    assert bench.name(1) == "high"
    assert bench.next(1) is None


def test_line_28_nodes_go_in_the_order_of_their_requests():
    """Those that have begun are in front of those that have not."""
    bench = Bench(max_batch=2)
    bench.chains("low", 2, 2, 2)
    assert [bench.requests() for _ in range(3)] == [[[0, 1]], [[0, 1]], [[2]]]


def test_a_worker_takes_first_what_is_on_its_own_device():
    """Subgraphs that have begun and are not pinned follow the order of their requests."""
    bench = Bench(max_batch=2, num_devices=2)
    bench.chains("low", *[9] * 4)
    launches = [bench.next(0), bench.next(1)]
    assert [serials(bench.processor, launch) for launch in launches if launch] == [[[0, 1]], [[2, 3]]]
    for launch in launches:
        bench.complete(launch)
    assert bench.requests(1) == [[2, 3]]
    assert bench.requests(0) == [[0, 1]]
    assert bench.processor.formation.num_moved == 0
