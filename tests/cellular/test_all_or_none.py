"""Refused requests: a call accepts all of its requests or none, and other requests are not affected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from pensieve_jax.cellular import (
    CapacityError,
    Cell,
    CellularConfig,
    CellularEngine,
    Graph,
    GraphError,
    Int,
)
from pensieve_jax.cellular.scheduler import CellScheduler
from tests.cellular.integrity import check_integrity


class Sum:
    """Cell that adds two inputs, or returns its only one."""

    state: ClassVar = {"x": Int()}

    def __init__(self, num_inputs: int) -> None:
        self.inputs = (self.state,) * num_inputs
        self.immediates = () if num_inputs else ("number",)

    def __call__(self, inputs: Any, number: Any = 0) -> dict[str, jax.Array]:
        return {"x": sum((one["x"] for one in inputs), number)}


NUMBER, SUM = Sum(0), Sum(2)


def add_up(numbers: list[int], graph: Graph) -> None:
    nodes = [graph.add(NUMBER, number=one) for one in numbers]
    total = nodes[0]
    for one in nodes[1:]:
        total = graph.add(SUM, (total, one))
    graph.returns(total)


@pytest.fixture(scope="module")
def engine() -> Iterator[CellularEngine]:
    cells = [Cell(one, name, 4, batch_sizes=(4,)) for one, name in ((NUMBER, "number"), (SUM, "sum"))]
    config = CellularConfig(
        num_rows=8, max_num_tasks=1, max_nodes=25, max_depth=9, max_num_waiting=5, launches_in_flight=1
    )
    with CellularEngine(cells, add_up, config, progress=False) as engine:
        yield engine


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a number of more than 32 bits": ([1, 2**40], GraphError, r"nodes\[1\].number is \[1099511627776\]"),
    "more cells than the limit": ([1] * 14, CapacityError, r"nodes\[25\] is 26.*max_nodes \(25\)"),
    "deeper than the limit": ([1] * 10, CapacityError, r"nodes\[18\] is 10.*max_depth \(9\) deep"),
    "more rows than there are": (
        [1] * 9,
        CapacityError,
        r"\.rows is 9, but must be at most num_rows \(8\), of the state \(x\)\.",
    ),
    "an empty list": ([], IndexError, "list index"),
    "not a list": (5, TypeError, "not iterable"),
}


@pytest.mark.parametrize("name", BAD)
def test_all_or_none(engine: CellularEngine, name: str) -> None:
    """Other requests that run, wait, or come in the same call behave as without the bad one."""
    bad, kind, match = BAD[name]
    running = engine.submit_many([[1, 2, 3], [4, 5], [6] * 6, [7] * 7])
    engine.step()
    before = engine.stats()
    assert before["num_waiting"] > 0
    with pytest.raises(kind, match=match):
        engine.submit(bad)
    with pytest.raises(kind, match=(r"requests\[2\]" if issubclass(kind, ValueError) else "") + ".*" + match):
        engine.submit_many([[1], [2, 3], bad, [4]])
    assert engine.stats() == before
    check_integrity(engine.processor)
    late = engine.submit([8, 9])
    while not all(one.done for one in (*running, late)):
        engine.step()
        engine.wait()
        check_integrity(engine.processor)
    sums = [int(one.result().states[0]["x"]) for one in (*running, late)]
    assert sums == [6, 9, 36, 49, 17]
    assert engine.stats()["num_rows_promised"] == engine.stats()["num_running"] == 0


def test_too_many_waiting_requests_are_refused(engine: CellularEngine) -> None:
    """Requests that have rows at once do not count as waiting."""
    engine.restart_with(CellScheduler)
    limit = r"requests is 6, but must be at most max_num_waiting \(5\) that wait for rows"
    with pytest.raises(CapacityError, match=limit):
        engine.submit_many([[1]] * 14)
    assert engine.stats()["num_running"] == engine.stats()["num_waiting"] == 0
    handles = engine.submit_many([[1]] * 13)
    assert (engine.stats()["num_running"], engine.stats()["num_waiting"]) == (8, 5)
    with pytest.raises(CapacityError, match=limit):
        engine.submit([1])
    while not all(one.done for one in handles):
        engine.step()


def test_run_limits_the_number_of_waiting_requests(engine: CellularEngine) -> None:
    outputs = engine.run([[one, 1] for one in range(40)])
    assert [int(one.states[0]["x"]) for one in outputs] == list(range(1, 41))


def test_requests_may_be_an_array(engine: CellularEngine) -> None:
    handles = engine.submit_many(np.arange(6).reshape(3, 2))  # type: ignore[arg-type]
    while not all(one.done for one in handles):
        engine.step()
    assert [int(one.result().states[0]["x"]) for one in handles] == [1, 5, 9]
    assert engine.submit_many(()) == []


def test_a_request_of_another_engine_is_not_cancelled(engine: CellularEngine) -> None:
    """Neither is one that this engine has forgotten: its number belongs to another request by then."""
    engine.restart_with(CellScheduler)
    old = engine.submit([1, 2, 3])
    engine.restart_with(CellScheduler)
    new = engine.submit([4, 5, 6])
    assert old.request_id == new.request_id
    assert not engine.cancel(old)
    while not new.done:
        engine.step()
    assert int(new.result().states[0]["x"]) == 15


def test_the_request_of_a_run_is_named(engine: CellularEngine) -> None:
    """It is named by its index among all of them, although they are submitted in slices."""
    engine.restart_with(CellScheduler)
    for place in (0, 700):
        todo = [[1]] * 800
        todo[place] = [2**40]
        with pytest.raises(GraphError, match=rf"requests\[{place}\].nodes\[0\].number is"):
            engine.run(todo)
    with pytest.raises(GraphError, match=r"requests\[512\].nodes\[0\].number is"):
        engine.run([[1]] * 512 + [[2**40]])
    with pytest.raises(GraphError, match=r"^nodes\[0\].number is"):
        engine.run([[2**40]])
    stats = engine.stats()
    assert not stats["num_running"] and not stats["num_waiting"]


def test_finished_and_cancelled_requests_are_counted(engine: CellularEngine) -> None:
    while engine.workers[0].num_in_flight:  # of cancelled requests
        engine.step()
    engine.restart_with(CellScheduler)
    engine.run([[1, 2], [3]])
    engine.cancel(engine.submit([4, 5, 6]))
    stats = engine.stats()
    assert (stats["num_submitted"], stats["num_answered"], stats["num_cancelled"]) == (3, 2, 1)
    assert stats["num_failed"] == 0
