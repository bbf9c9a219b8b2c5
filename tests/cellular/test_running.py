"""What a running engine must not do: compile, spin, or grow."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from model_defs.recurrent import Seq2Seq, TreeLSTM
from pensieve_jax.cellular import Cell, CellularConfig, CellularEngine, Float, Graph, Int, LaunchFailedError
from pensieve_jax.cellular.device.worker import DeviceWorker
from pensieve_jax.cellular.request_processor import RequestProcessor
from tests.cellular.integrity import check_integrity
from tests.cellular.test_engine import Broken
from tests.launching import optimized
from tests.models.recurrent.test_tree_lstm import random_tree
from tests.seeds import enough, new_seed

VOCAB = 40  # the same as for random trees


def engine_of(model: Any, num_devices: int) -> CellularEngine:
    cells = [cell._replace(max_batch=4, batch_sizes=(1, 4)) for cell in model.cells()]
    config = CellularConfig(num_rows=64, num_devices=num_devices, max_num_tasks=1, compile_at_start=True)
    return CellularEngine(cells, model.unfold, config, progress=False)


@pytest.mark.parametrize(
    ("is_terminal", "progress"), [(False, None), (True, None), (True, False), (False, True)]
)
def test_a_bar_is_for_terminals_unless_told_otherwise(monkeypatch, capsys, is_terminal, progress) -> None:
    cells = Seq2Seq.random(hidden_size=4, vocab_size=8).cells(encoder_max_batch=1, decoder_max_batch=1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with CellularEngine(cells, pytest.fail, CellularConfig(num_rows=8, max_num_tasks=1), progress=progress):
        shown = "compiling" in capsys.readouterr().err
    assert shown == (is_terminal if progress is None else progress)


def test_nothing_is_compiled_after_the_engine_was_created() -> None:
    """This holds for joining, leaving and cancelled requests, moves between devices, and lost devices."""
    model = TreeLSTM.random(hidden_size=8, vocab_size=VOCAB, seed=0)
    rng = random.Random(new_seed())
    with engine_of(model, 2) as engine:
        whole = [worker.programs.compiled for worker in engine.workers]
        handles = []
        for part in range(60):
            for worker, executables in zip(engine.workers, whole, strict=True):
                worker.programs.compiled = executables
            if part in range(20, 25) or part in range(40, 45):  # first with a device's rows, later without
                worker = engine.workers[part % 2]
                broken = {
                    key: Broken(one, deletes=part < 40) for key, one in worker.programs.compiled.items()
                }
                worker.programs.compiled = broken
            handles += engine.submit_many(
                [model.request(random_tree(rng, rng.randint(1, 30))) for _ in range(rng.randint(1, 4))]
            )
            if rng.random() < 0.2:
                engine.cancel(rng.choice(handles))
            engine.step()
            engine.wait()
        while not all(handle.done for handle in handles):
            engine.step()
        stats = engine.stats()
        assert any(isinstance(handle.error, LaunchFailedError) for handle in handles)
        assert sum(handle.error is None for handle in handles) > 20
        assert stats["num_moved_rows"] > 0 and sum(worker.num_losses for worker in engine.workers) > 0
        assert stats["num_compilations"] == 0


@pytest.mark.long
def test_nothing_is_compiled_for_chains_that_end_early() -> None:
    model = Seq2Seq.random(hidden_size=8, vocab_size=VOCAB, seed=0)
    rng = random.Random(new_seed())
    with engine_of(model, 2) as engine:
        words = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(40)]
        engine.run([model.request(one, max_extra_steps=rng.randint(0, 6)) for one in words])
        assert engine.stats()["num_compilations"] == 0


class Slow:
    """A cell that takes milliseconds on any device."""

    state: ClassVar = {"x": Float(300, 300)}

    def __call__(self, inputs: Any, batch: int = 0) -> dict[str, jax.Array]:
        x = inputs[0]["x"]
        return {"x": jnp.tanh(jax.lax.fori_loop(0, 4, lambda _, y: y @ y + 1e-3, x))}


SLOW = Slow()


@pytest.fixture(scope="module", params=[1, *(pytest.param(num, marks=pytest.mark.long) for num in (2, 3))])
def slow_engine(request: pytest.FixtureRequest) -> Iterator[CellularEngine]:
    config = CellularConfig(num_rows=16, num_devices=request.param, max_num_tasks=1, launches_in_flight=1)
    unfold = lambda num, graph: graph.returns(graph.chain(SLOW, num=num)[-1])  # noqa: E731
    cell = Cell(SLOW, "slow", max_batch=4, batch_sizes=(4,))
    with optimized():
        engine = CellularEngine([cell], unfold, config, progress=False)
    with engine:
        yield engine


def test_an_engine_waits_for_launches_instead_of_spinning(
    slow_engine: CellularEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that sees no launch end is followed by a wait, after which one has ended."""
    counts = {"steps": 0, "launches": 0}
    for worker in slow_engine.workers:

        def launch(one: Any, begin: Any = worker.launch) -> None:
            counts["launches"] += 1
            begin(one)

        monkeypatch.setattr(worker, "launch", launch)
    step = slow_engine.step

    def counted() -> Any:
        counts["steps"] += 1
        return step()

    monkeypatch.setattr(slow_engine, "step", counted)
    slow_engine.run([3, 5, 2, 7, 4, 4, 6, 3, 9, 1, 2, 8])
    print(counts)
    assert counts["launches"] >= 9
    assert counts["steps"] <= 2 * counts["launches"] + 1


def test_the_engine_waits_for_the_device_that_started_first(
    slow_engine: CellularEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = slow_engine.submit_many([2] * 12)
    slow_engine.wait()  # nothing was launched: it returns at once
    slow_engine.step()
    busy = [worker for worker in slow_engine.workers if worker.num_in_flight]
    assert len(busy) == len(slow_engine.workers)
    waited = []
    with monkeypatch.context() as patched:  # on a loaded machine a later launch may end before this line
        patched.setattr(DeviceWorker, "has_ended", property(lambda worker: worker in waited))
        patched.setattr(DeviceWorker, "wait", lambda worker: waited.append(worker))
        slow_engine.wait()
        slow_engine.wait()  # a launch has ended: it returns at once
    assert waited == [busy[0]]
    while not all(handle.done for handle in handles):
        slow_engine.step()
        slow_engine.wait()


def test_the_wait_for_a_device_ends_with_its_launch(slow_engine: CellularEngine) -> None:
    handles = slow_engine.submit_many([2] * 12)
    slow_engine.step()
    for worker in slow_engine.workers:
        worker.wait()
        assert worker.has_ended
    while not all(handle.done for handle in handles):
        slow_engine.step()
        slow_engine.wait()


def test_the_engine_does_not_wait_for_a_failed_launch(
    slow_engine: CellularEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = slow_engine.workers[-1]
    broken = {key: Broken(one, deletes=False) for key, one in worker.programs.compiled.items()}
    monkeypatch.setattr(worker.programs, "compiled", broken)
    handles = slow_engine.submit_many([2] * 12)
    slow_engine.step()
    assert worker.has_ended
    with monkeypatch.context() as patched:
        patched.setattr(DeviceWorker, "wait", lambda _: pytest.fail("it waits"))
        slow_engine.wait()
    ended = slow_engine.step()
    assert any(isinstance(handle.error, LaunchFailedError) for handle in ended)
    while not all(handle.done for handle in handles):
        slow_engine.step()
        slow_engine.wait()


class Step:
    """Cell of a chain."""

    state: ClassVar = {"x": Int(), "sum": Int()}
    immediates = ("token",)
    emits = ("x",)

    def __call__(self, inputs: Any, token: jax.Array) -> dict[str, jax.Array]:
        (before,) = inputs
        return {"x": token % 7, "sum": before["sum"] + token}


class Pair:
    """Cell that joins two."""

    state = Step.state
    inputs = (Step.state, Step.state)

    def __call__(self, inputs: Any, batch: int = 0) -> dict[str, jax.Array]:
        left, right = inputs
        return {name: left[name] + right[name] for name in left}


STEP, PAIR = Step(), Pair()


def unfold_several(words: Sequence[int], graph: Graph) -> None:
    """Build chains that may end early, and for an odd number of words a graph with nodes read twice."""
    if len(words) % 2 == 0:
        graph.chain(STEP, words, until=3 if words[0] % 2 else None)
        return
    leaves = [graph.add(STEP, (None,), token=word) for word in words]
    top = leaves[0]
    for one in leaves:
        top = graph.add(PAIR, (top, one))
    graph.returns(top, leaves[0])


@pytest.fixture
def cheap_engine() -> Iterator[CellularEngine]:
    cells = [Cell(STEP, "step", 64, batch_sizes=(64,)), Cell(PAIR, "pair", 64, 1, batch_sizes=(64,))]
    config = CellularConfig(num_rows=2000, num_devices=2, max_num_tasks=5, compile_at_start=True)
    with CellularEngine(cells, unfold_several, config, progress=False) as engine:
        yield engine


def live(engine: CellularEngine, rng: random.Random, num: int) -> None:
    """Serve requests, a few hundred at a time; cancel one in ten."""
    num_sent, handles = 0, []
    while handles or num_sent < num:
        if num_sent < num and len(handles) < 300:
            size = rng.randint(1, 60)
            handles += engine.submit_many(
                [[rng.randrange(1000) for _ in range(rng.randint(1, 8))] for _ in range(size)]
            )
            num_sent += size
        if rng.random() < 0.5:
            for _ in range(len(handles) // 60):
                engine.cancel(handles.pop(rng.randrange(len(handles))))
        engine.step()
        engine.wait()
        handles = [handle for handle in handles if not handle.done]
    while any(worker.num_in_flight for worker in engine.workers):
        engine.step()
        engine.wait()


def growth(engine: CellularEngine, num: int) -> int:
    """Return the increase of used bytes from `2 * num` to `3 * num` served requests."""
    rng = random.Random(new_seed())
    live(engine, rng, num)
    held = []
    tracemalloc.start()
    try:
        for _ in range(2):
            live(engine, rng, num)
            gc.collect()
            arrays = sum(array.nbytes for array in jax.live_arrays())
            held.append(tracemalloc.get_traced_memory()[0] + arrays)
    finally:
        tracemalloc.stop()
    print(f"{held} bytes")
    return held[1] - held[0]


MAX_BYTES = 48 << 10  # lists and dictionaries occasionally allocate ahead


@pytest.mark.long
def test_memory_does_not_grow_with_requests(cheap_engine: CellularEngine) -> None:
    """4,000 requests may add a dozen bytes each at most, 35,000 one or two."""
    assert growth(cheap_engine, enough(4_000, 35_000)) < MAX_BYTES
    assert cheap_engine.stats()["num_compilations"] == cheap_engine.stats()["num_rows_promised"] == 0
    tables = cheap_engine.processor
    assert not tables.nodes.consumers and not tables.subgraphs.consumers and not tables.subgraphs.firsts
    assert not tables.handles and not tables.admission.request_ids
    assert max(tables.nodes.capacity, tables.subgraphs.capacity, tables.requests.capacity) < 40_000
    check_integrity(tables)


@pytest.mark.long
def test_growing_memory_is_detected(cheap_engine: CellularEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    finish = RequestProcessor._finish
    monkeypatch.setattr(
        RequestProcessor, "_finish", lambda self, one: kept.append(finish(self, one)) or kept[-1]
    )
    assert growth(cheap_engine, 1700) > MAX_BYTES
