"""Programs that are compiled when they are first needed: which, what waits for them, and equal results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs.recurrent import LSTM, Seq2Seq, TreeLSTM
from pensieve_jax.cellular import Cell, CellularConfig, CellularEngine, Float, Graph, Int, LaunchFailedError
from pensieve_jax.cellular.device import device_programs
from pensieve_jax.core.errors import ConfigError
from tests.cellular.integrity import check_integrity

VOCAB = 20


class LaterThreads:
    """An executor whose tasks run when the test says so."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.is_shut = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: function(*args)))
        return future

    def run(self) -> int:
        """Run the tasks that wait; return their number."""
        waiting, self.waiting = self.waiting, []
        for future, work in waiting:
            future.set_result(work())
        return len(waiting)

    def fail(self, error: Exception) -> None:
        """End the tasks that wait with an error."""
        waiting, self.waiting = self.waiting, []
        for future, _ in waiting:
            future.set_exception(error)

    def shutdown(self, *, cancel_futures: bool) -> None:
        self.is_shut = cancel_futures


class Sum:
    """A chain that adds up, in a product so that a batch size may matter."""

    state: ClassVar = {"sum": Float(4), "last": Int()}
    immediates = ("word",)
    emits = ("last",)

    def __init__(self) -> None:
        self.factor = 1

    def __call__(self, inputs: Any, word: jax.Array) -> dict[str, jax.Array]:
        (before,) = inputs
        total = before["sum"] @ jnp.eye(4) + self.factor * word[:, None].astype(jnp.float32)
        return {"sum": total, "last": word}


def engine_of(cell: Any, sizes: tuple[int, ...] = (1, 2, 4), **settings: Any) -> CellularEngine:
    config = CellularConfig(**{"num_rows": 32, "max_num_tasks": 5, "launches_in_flight": 1} | settings)

    def unfold(words: list[int], graph: Graph) -> None:
        graph.returns(graph.chain(cell, words)[-1])

    return CellularEngine([Cell(cell, "sum", sizes[-1], batch_sizes=sizes)], unfold, config, progress=False)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[LaterThreads]:
    """All executors of engines that the test makes."""
    made: list[LaterThreads] = []

    def make(*_: Any, **__: Any) -> LaterThreads:
        made.append(LaterThreads())
        return made[-1]

    monkeypatch.setattr(device_programs, "ThreadPoolExecutor", make)
    return made


@pytest.fixture
def lazy(threads: list[LaterThreads]) -> Iterator[tuple[CellularEngine, LaterThreads]]:
    """An engine of one cell, and its compiling threads."""
    with engine_of(Sum()) as engine:
        yield engine, threads[0]


def keys(engine: CellularEngine) -> set[tuple[int, int]]:
    """Return the number of tasks and the batch size of every compiled program."""
    return {key[1:] for worker in engine.workers for key in worker.programs.compiled}


def total(handle: Any) -> float:
    return float(handle.result().states[0]["sum"][0])


def steps(engine: CellularEngine, num: int = 5) -> None:
    """Step, and wait for launches that run, but not for compilations."""
    for _ in range(num):
        engine.step()
        for worker in engine.workers:
            worker.wait()


# How many programs there are.


def test_a_start_compiles_the_smallest_batch_of_each_cell() -> None:
    model = Seq2Seq.random(hidden_size=4, vocab_size=VOCAB, seed=0)
    with CellularEngine(model.cells(), model.unfold, progress=False) as engine:
        assert engine.stats()["num_programs"] == len(model.cells()) == 2
        assert keys(engine) == {(1, 1)}


def test_a_start_can_compile_all() -> None:
    with engine_of(Sum(), compile_at_start=True) as engine:
        assert engine.stats()["num_programs"] == 9
        assert keys(engine) == {(num, size) for num in (1, 2, 5) for size in (1, 2, 4)}
        engine.run([[1] * 9] * 7)
        assert engine.stats()["num_compilations"] == 0


def test_only_sizes_that_are_used_are_compiled(lazy: tuple[CellularEngine, LaterThreads]) -> None:
    engine, threads = lazy
    (alone,) = engine.submit_many([[3]])
    steps(engine)
    assert total(alone) == 3 and not threads.waiting and keys(engine) == {(1, 1)}
    three = engine.submit_many([[1], [2], [3]])
    engine.step()
    assert threads.run() == 1 and not any(handle.done for handle in three)
    steps(engine)
    assert [total(handle) for handle in three] == [1, 2, 3]
    assert keys(engine) == {(1, 1), (1, 4)} and engine.stats()["num_programs"] == 2


# What waits.


def test_a_launch_waits_for_its_size_and_step_does_not(lazy: tuple[CellularEngine, LaterThreads]) -> None:
    """Nothing else begins meanwhile, but requests can be submitted and cancelled."""
    engine, threads = lazy
    (running,) = engine.submit_many([[1] * 3])
    engine.step()  # in the size that the start compiled
    first, second = engine.submit_many([[5], [6]])
    steps(engine)
    assert running.done and not first.done and len(threads.waiting) == 2
    assert engine.stats()["num_running"] == 2
    (late,) = engine.submit_many([[7]])
    assert engine.step() == [] and engine.cancel(second)
    with pytest.raises(ConfigError, match="launches in flight is 1"):
        engine.restart_with(engine._make_scheduler)
    threads.run()
    steps(engine)
    assert total(first) == 5 and total(late) == 7 and second.done
    check_integrity(engine.processor)


def test_wait_waits_for_the_program(
    lazy: tuple[CellularEngine, LaterThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, threads = lazy
    monkeypatch.setattr(device_programs, "wait", lambda *_, **__: threads.run())
    assert engine.run([[1], [2], [3]])[2].emitted["last"].tolist() == [3]


def test_tasks_run_one_by_one_until_their_program_is_compiled(
    lazy: tuple[CellularEngine, LaterThreads],
) -> None:
    engine, threads = lazy
    ran: list[int] = []
    (worker,) = engine.workers
    run_part = worker.run_part
    worker.run_part = lambda kind, part: ran.append(part.num_tasks) or run_part(kind, part)  # type: ignore
    (before,) = engine.submit_many([[1, 2, 3, 4, 5, 6, 7, 8]])
    steps(engine)
    assert total(before) == 36 and ran == [1] * 8
    assert len(threads.waiting) == 1, "one at a time, since a process waits for all at its end"
    threads.run()
    ran.clear()
    (after,) = engine.submit_many([[1, 2, 3, 4, 5, 6, 7, 8]])
    steps(engine)
    assert total(after) == 36 and ran == [5, 1, 1, 1] and keys(engine) == {(1, 1), (5, 1)}
    threads.run()
    ran.clear()
    engine.submit_many([[1, 2, 3, 4, 5, 6, 7, 8]])
    steps(engine)
    assert ran == [5, 2, 1]


def test_on_two_devices_nothing_begins_before_the_held_launch(threads: list[LaterThreads]) -> None:
    """A later launch could overwrite the rows that it reads."""
    with engine_of(Sum(), num_devices=2) as engine:
        handles = engine.submit_many([[1], [2], [3]])
        steps(engine)
        assert [len(one.waiting) for one in threads] == [1, 0]
        assert not any(worker.num_in_flight for worker in engine.workers)
        threads[0].run()
        steps(engine)
        assert [total(handle) for handle in handles] == [1, 2, 3]
        assert [len(worker.programs.compiled) for worker in engine.workers] == [2, 1]


def test_close_compiles_no_more(lazy: tuple[CellularEngine, LaterThreads]) -> None:
    engine, threads = lazy
    engine.submit_many([[1], [2]])
    engine.step()
    engine.close()
    assert threads.is_shut


# What fails.


def test_a_size_that_cannot_be_compiled_fails_its_requests_only(
    lazy: tuple[CellularEngine, LaterThreads],
) -> None:
    engine, threads = lazy
    failed = engine.submit_many([[1], [2]])
    engine.step()
    (late,) = engine.submit_many([[3]])
    threads.fail(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted"))
    steps(engine)
    for handle in failed:
        with pytest.raises(
            LaunchFailedError, match="2 cells of sum did not run: RESOURCE_EXHAUSTED: planted"
        ):
            handle.result()
    assert total(late) == 3
    again = engine.submit_many([[1], [2]])
    engine.step()
    assert threads.run() == 1, "it is compiled again"
    steps(engine)
    assert [total(handle) for handle in again] == [1, 2] and engine.stats()["num_rows_promised"] == 0


def test_a_program_of_several_tasks_that_cannot_be_compiled_is_done_without(
    lazy: tuple[CellularEngine, LaterThreads], caplog: pytest.LogCaptureFixture
) -> None:
    engine, threads = lazy
    engine.submit_many([[1] * 5])
    engine.step()
    threads.fail(jax.errors.JaxRuntimeError("planted"))
    with caplog.at_level(logging.WARNING):
        steps(engine)
        (handle,) = engine.submit_many([[1] * 5])
        steps(engine)
    assert total(handle) == 5 and not threads.waiting
    assert [record.getMessage() for record in caplog.records] == [
        "sum 5 x 1: its tasks run one by one: planted"
    ]


# What results are.


@pytest.mark.parametrize(
    "make",
    [
        lambda: LSTM.random(hidden_size=8, vocab_size=VOCAB, seed=1),
        pytest.param(lambda: Seq2Seq.random(hidden_size=8, vocab_size=VOCAB, seed=2), marks=pytest.mark.long),
        pytest.param(
            lambda: TreeLSTM.random(hidden_size=8, vocab_size=VOCAB, seed=3), marks=pytest.mark.long
        ),
    ],
    ids=["lstm", "seq2seq", "tree"],
)
def test_results_are_bitwise_those_of_programs_from_the_start(make: Callable[[], Any]) -> None:
    """First with programs of one task, then with those that were compiled meanwhile."""
    model, rng = make(), np.random.default_rng(0)
    cells = [cell._replace(max_batch=4, batch_sizes=(1, 2, 4)) for cell in model.cells()]
    words = [rng.integers(3, VOCAB, rng.integers(1, 12)).tolist() for _ in range(9)]
    if isinstance(model, TreeLSTM):
        requests = [model.request(((1, 2), (3, (4, word[0])))) for word in words]
    elif isinstance(model, Seq2Seq):
        requests = [model.request(word, num_target_steps=4) for word in words]
    else:
        requests = [model.request(word) for word in words]

    def served(*, compile_at_start: bool) -> Iterator[list[Any]]:
        config = CellularConfig(num_rows=64, launches_in_flight=1, compile_at_start=compile_at_start)
        with CellularEngine(cells, model.unfold, config, progress=False) as engine:
            for _ in range(3):
                yield [(output.states, sorted(output.emitted.items())) for output in engine.run(requests)]

    expected, *others = [*served(compile_at_start=True), *served(compile_at_start=False)]
    for one in others:
        jax.tree.map(np.testing.assert_array_equal, one, expected)


def test_later_changes_of_a_cell_have_no_effect(threads: list[LaterThreads]) -> None:
    cell = Sum()
    with engine_of(cell) as engine:
        cell.factor = 100
        handles = engine.submit_many([[1], [2], [3]])
        engine.step()
        threads[0].run()
        steps(engine)
        assert [total(handle) for handle in handles] == [1, 2, 3]


def test_settings_are_those_of_the_thread_that_made_the_engine(threads: list[LaterThreads]) -> None:
    with jax.default_matmul_precision("highest"):
        engine = engine_of(Sum())
    with engine:
        program = engine.workers[0].programs._program((0, 5, 4))
        assert program.lower().as_text().count("precision = [HIGHEST, HIGHEST]") == 5
