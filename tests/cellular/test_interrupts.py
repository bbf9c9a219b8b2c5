"""An interrupt in the middle of a call: lost requests report it, and the engine continues."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from pensieve_jax import EngineClosedError
from pensieve_jax.cellular import (
    Cell,
    CellRequest,
    CellularConfig,
    CellularEngine,
    Graph,
    Int,
    LaunchFailedError,
)
from pensieve_jax.core.errors import PensieveError
from tests.cellular.integrity import check_integrity
from tests.seeds import enough, new_seed


class Add:
    """Cell that adds up its words."""

    state = {"sum": Int()}  # noqa: RUF012
    immediates = ("word",)

    def __call__(self, inputs: Any, word: jax.Array) -> dict[str, jax.Array]:
        return {"sum": inputs[0]["sum"] + word}


ADD = Add()


def unfold(words: list[int], graph: Graph) -> None:
    graph.returns(graph.chain(ADD, words)[-1])


@pytest.fixture(scope="module")
def engine() -> Iterator[CellularEngine]:
    config = CellularConfig(num_rows=8, max_num_tasks=2)
    with CellularEngine([Cell(ADD, "add", 4, batch_sizes=(4,))], unfold, config, progress=False) as engine:
        yield engine


class Interrupt:
    """Ctrl-C at a line of this package, counted from the first that runs.

    Attributes:
        was_told: whether it came.
    """

    def __init__(self, num_lines: int) -> None:
        self._left = num_lines
        self.was_told = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        return self._line if "pensieve_jax/cellular" in frame.f_code.co_filename else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        self._left -= 1
        if not self._left:
            self.was_told = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


# If the line is in a generator that is being closed, Python prints and ignores the exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num", [60, pytest.param(enough(300, 1000), marks=pytest.mark.long)])
def test_nothing_hangs_after_an_interrupt(engine: CellularEngine, num: int) -> None:
    """At any line, every earlier request gets an answer or an error, and later ones are served."""
    rng = random.Random(new_seed())
    num_told = 0
    for _ in range(num):
        handles = engine.submit_many(
            [[rng.randrange(9)] * rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        )
        try:
            with Interrupt(rng.randint(1, 3000)) as interrupt:
                engine.run([[1, 2], [3] * 7] * rng.randint(1, 4))
        except KeyboardInterrupt:
            num_told += 1
        outputs = engine.run([[4, 5], [6]])
        assert [int(one.states[0]["sum"]) for one in outputs] == [9, 6]
        while not all(one.done for one in handles):
            engine.step()
            engine.wait()
        assert all(isinstance(one.error, LaunchFailedError | None) for one in handles)
        assert interrupt.was_told or all(one.error is None for one in handles)
        check_integrity(engine.processor)
        stats = engine.stats()
        assert not stats["num_running"] and not stats["num_waiting"] and not stats["num_rows_promised"]
    assert num_told > num / 4


def test_requests_that_were_submitted_just_before_an_interrupt_are_cancelled(engine: CellularEngine) -> None:
    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not CellularEngine._submit_many.__code__:
            return None
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    with pytest.raises(KeyboardInterrupt):
        engine.run([[1, 2], [3] * 7])
    assert sys.gettrace() is None
    engine.run([[4]])
    assert not engine.stats()["num_running"], "requests are left that no caller holds"


def test_an_interrupted_run_is_cancelled(engine: CellularEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(3))
    step = engine.step

    def interrupted() -> list[CellRequest]:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    mine = engine.submit([1] * 50)
    with pytest.raises(KeyboardInterrupt):
        engine.run([[1] * 500] * 20)
    monkeypatch.undo()
    before = engine.stats()["num_running"] + engine.stats()["num_waiting"]
    assert before == 1, "requests are left that no caller holds"
    while not mine.done:
        engine.step()
    assert int(mine.result().states[0]["sum"]) == 50


def test_one_thread_at_a_time(engine: CellularEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []

    def from_elsewhere() -> list[Any]:
        def call() -> None:
            try:
                engine.submit([1])
            except PensieveError as error:
                seen.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return []

    monkeypatch.setattr(engine._loop, "step", from_elsewhere)
    engine.step()
    assert "Another thread is using the engine" in str(seen[0])


def test_unfinished_requests_get_an_error_when_the_engine_closes() -> None:
    cells = [Cell(ADD, "add", 4, batch_sizes=(4,))]
    with CellularEngine(cells, unfold, CellularConfig(max_num_tasks=1), progress=False) as engine:
        handle = engine.submit([1, 2])
    assert handle.done
    with pytest.raises(EngineClosedError):
        handle.result()
    for call in (engine.step, engine.wait, lambda: engine.run([]), lambda: engine.submit([1])):
        with pytest.raises(EngineClosedError):
            call()
