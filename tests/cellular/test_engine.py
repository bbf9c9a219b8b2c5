"""The engine as users see it: their own cells, errors that name the cause, launches that fail."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_defs.recurrent import TreeLSTM
from pensieve_jax.cellular import (
    CapacityError,
    Cell,
    CellError,
    CellularConfig,
    CellularEngine,
    Float,
    Graph,
    GraphError,
    Int,
    LaunchFailedError,
)
from pensieve_jax.core.errors import ConfigError, EngineClosedError
from tests.cellular.integrity import check_integrity

SIZE = 8


class Gru(nnx.Module):
    """A user's own cell."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.state = {"h": Float(SIZE)}
        self.immediates = ("token",)
        self.embed = nnx.Embed(20, SIZE, rngs=rngs)
        self.word = nnx.Linear(SIZE, 3 * SIZE, rngs=rngs)
        self.before = nnx.Linear(SIZE, 3 * SIZE, rngs=rngs)

    def __call__(self, inputs: Any, token: jax.Array) -> dict[str, jax.Array]:
        h = inputs[0]["h"]
        word, before = self.word(self.embed(token)), self.before(h)
        reset, update = jnp.split(jax.nn.sigmoid(word[:, : 2 * SIZE] + before[:, : 2 * SIZE]), 2, axis=1)
        new = jnp.tanh(word[:, 2 * SIZE :] + reset * before[:, 2 * SIZE :])
        return {"h": (1 - update) * new + update * h}


@pytest.fixture(scope="module")
def gru() -> Gru:
    return Gru(nnx.Rngs(0))


def unfold_with(gru: Gru) -> Any:
    def unfold(words: list[int], graph: Graph) -> None:
        graph.returns(graph.chain(gru, words)[-1])

    return unfold


@pytest.fixture(scope="module")
def engine(gru: Gru) -> Any:
    config = CellularConfig(
        num_rows=16,
        max_num_tasks=2,
        max_nodes=60,
        max_depth=50,
        max_num_waiting=40,
        compile_at_start=True,
    )
    cell = Cell(gru, "gru", max_batch=4, batch_sizes=(4,))
    with CellularEngine([cell], unfold_with(gru), config, progress=False) as engine:
        yield engine


def by_loop(gru: Gru, words: list[int]) -> np.ndarray:
    h = jnp.zeros((1, SIZE))
    for word in words:
        h = gru(({"h": h},), jnp.array([word]))["h"]
    return np.asarray(h[0])


def test_a_cell_of_ones_own(engine, gru):
    rng = random.Random(0)
    sentences = [[rng.randrange(20) for _ in range(rng.randint(1, 12))] for _ in range(40)]
    outputs, stats = engine.run(sentences), engine.stats()
    assert stats["num_compilations"] == stats["num_rows_promised"] == stats["num_running"] == 0
    for words, output in zip(sentences, outputs, strict=True):
        np.testing.assert_allclose(output.states[0]["h"], by_loop(gru, words), atol=2e-5)
    with pytest.raises(KeyError):
        _ = outputs[0].tokens


def test_a_request_that_joins_and_one_that_is_cancelled(engine, gru):
    first = engine.submit([1] * 30)
    for _ in range(3):
        engine.step()
    second, third = engine.submit_many([[2, 3], [4] * 40])
    assert engine.cancel(third) and third.done and not engine.cancel(third)
    while not (first.done and second.done):
        engine.step()
    np.testing.assert_allclose(first.result().states[0]["h"], by_loop(gru, [1] * 30), atol=2e-5)
    np.testing.assert_allclose(second.result().states[0]["h"], by_loop(gru, [2, 3]), atol=2e-5)


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        ([], GraphError, r"nodes\[0\].token is \[\]"),
        ([1, 2**40], GraphError, r"nodes\[0\].token"),
        ([1] * 61, CapacityError, r"max_nodes \(60\)"),
        ([1] * 51, CapacityError, r"nodes\[50\] is 51, but must be at most max_depth \(50\)"),
    ],
)
def test_invalid_requests_are_refused(engine, words, error, match):
    with pytest.raises(error, match=match):
        engine.submit(words)
    with pytest.raises(error):
        engine.submit_many([[1, 2], words])
    assert engine.stats()["num_running"] == 0, "part of a refused call runs"


def test_too_many_waiting_requests_are_refused(engine):
    with pytest.raises(CapacityError, match="max_num_waiting"):
        engine.submit_many([[1]] * (16 + 41))


def refuse(graph_of: Any, match: str, gru: Gru, engine: CellularEngine) -> None:
    graph = Graph(engine.types, max_nodes=50)
    graph.begin()
    with pytest.raises(GraphError, match=match):
        graph_of(graph)


def test_invalid_graphs_are_refused(engine, gru):
    refuse(lambda graph: graph.add(gru, (3,), token=1), r"nodes\[0\].inputs\[0\] is 3.*cycles", gru, engine)
    refuse(lambda graph: graph.add(gru, (None,)), r"nodes\[0\].immediates.*token", gru, engine)
    refuse(
        lambda graph: graph.add(gru, (None, None), token=1),
        r"nodes\[0\].inputs.*a sequence of 1",
        gru,
        engine,
    )
    refuse(lambda graph: graph.chain(gru, [1], until=3), r"until.*emits nothing", gru, engine)
    refuse(lambda graph: graph.returns(0), "^returns is 0, but must be a node of this request", gru, engine)
    refuse(lambda graph: graph.end(), "at least one node", gru, engine)
    with pytest.raises(CellError, match="a cell of this engine: gru"):
        Graph(engine.types, max_nodes=50).chain(Gru(nnx.Rngs(1)), [1])


class Wrong:
    """A cell that returns something else than it declares."""

    def __init__(self, state: Any, returned: Any, **more: Any) -> None:
        self.state, self.returned = state, returned
        vars(self).update(more)

    def __call__(self, inputs: Any) -> Any:
        return self.returned(inputs)


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (Wrong({"h": Float(3)}, lambda _: {"h": jnp.zeros((1, 4))}), r"wrong.state\['h'\].*float32\[1, 4\]"),
        (Wrong({"h": Float(3)}, lambda i: {"h": i[0]["h"].astype("int32")}), r"wrong.state\['h'\].*int32"),
        (Wrong({"h": Float(3)}, lambda i: {"g": i[0]["h"]}), r"wrong.state.*returns: \['g'\]"),
        (Wrong({"h": Float(3)}, lambda i: i[0]["h"]), "wrong.state.*returns"),
        (Wrong({}, lambda i: {}), "wrong.state.*of one at least"),
        (Wrong({"h": Float(0)}, lambda i: i[0]), "positive ints"),
        (Wrong({"h": Float(3)}, lambda i: i[0], emits=("h",)), "wrong.emits.*scalar"),
        (Wrong({"h": Int()}, lambda i: i[0], immediates=("a",)), "wrong.*callable as a cell"),
    ],
)
def test_invalid_cells_are_refused(cell, match):
    with pytest.raises(CellError, match=match):
        CellularEngine([Cell(cell, "wrong", max_batch=1)], lambda request, graph: None, progress=False)


def test_more_devices_than_there_are(gru):
    with pytest.raises(ConfigError, match="num_devices is 99"):
        CellularEngine([Cell(gru, "gru")], unfold_with(gru), CellularConfig(num_devices=99), progress=False)


def test_a_closed_engine(gru):
    engine = CellularEngine(
        [Cell(gru, "gru", max_batch=1)], unfold_with(gru), CellularConfig(max_num_tasks=1), progress=False
    )
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit([1])


class Broken:
    """An executable whose launch fails, with or without its pools."""

    def __init__(self, executable: Any, *, deletes: bool) -> None:
        self.executable, self.deletes, self.num_left = executable, deletes, 1

    def __call__(self, pool: Any, *rest: Any) -> Any:
        if not self.num_left:
            return self.executable(pool, *rest)
        self.num_left -= 1
        if self.deletes:
            for array in pool:
                array.delete()
        raise jax.errors.JaxRuntimeError("INTERNAL: planted")


@pytest.mark.parametrize("place", [0, 1])
def test_a_device_that_loses_its_rows_between_two(place):
    """Only requests of the launch fail; those with state there, or about to get some, begin again."""
    model = TreeLSTM.random(hidden_size=8, vocab_size=20, seed=0)
    cells = [Cell(one.module, one.name, 2, one.priority, (2,)) for one in model.cells()]
    config = CellularConfig(num_rows=64, num_devices=2, max_num_tasks=1)
    rng = random.Random(place)
    words = [[rng.randrange(20) for _ in range(6)] for _ in range(8)]
    trees = [((a, b), ((c, d), (e, f))) for a, b, c, d, e, f in words]
    with CellularEngine(cells, model.unfold, config, progress=False) as engine:
        expected = engine.run([model.request(tree) for tree in trees])
        handles = engine.submit_many([model.request(tree) for tree in trees])
        for _ in range(6):
            engine.step()
        worker = engine.workers[place]
        worker.programs.compiled = {
            key: Broken(one, deletes=True) for key, one in worker.programs.compiled.items()
        }
        while not all(handle.done for handle in handles):
            engine.step()
        failed = [handle for handle in handles if handle.error is not None]
        assert 0 < len(failed) < len(handles) and worker.num_losses
        assert all(isinstance(handle.error, LaunchFailedError) for handle in failed)
        for handle, other in zip(handles, expected, strict=True):
            if handle.error is None:
                np.testing.assert_array_equal(handle.result().states[0]["h"], other.states[0]["h"])
        assert engine.stats()["num_rows_promised"] == 0
        check_integrity(engine.processor)


@pytest.mark.parametrize("deletes", [False, True], ids=["rows stay", "rows go"])
def test_a_launch_that_fails(gru, deletes):
    """Its requests fail; others continue, or begin again if their state was lost."""
    config = CellularConfig(num_rows=16, max_num_tasks=1, launches_in_flight=1)
    with CellularEngine(
        [Cell(gru, "gru", max_batch=2, batch_sizes=(2,))], unfold_with(gru), config, progress=False
    ) as engine:
        handles = engine.submit_many([[1, 2, 3], [4, 5, 6, 7], [8, 9]])
        (worker,) = engine.workers
        engine.step()
        worker.programs.compiled = {
            key: Broken(one, deletes=deletes) for key, one in worker.programs.compiled.items()
        }
        while not all(handle.done for handle in handles):
            engine.step()
        for handle in handles[:2]:
            with pytest.raises(LaunchFailedError, match="2 cells of gru did not run: INTERNAL: planted"):
                handle.result()
        np.testing.assert_allclose(handles[2].result().states[0]["h"], by_loop(gru, [8, 9]), atol=2e-5)
        again = engine.run([[1, 2, 3]])[0]
        np.testing.assert_allclose(again.states[0]["h"], by_loop(gru, [1, 2, 3]), atol=2e-5)
        assert engine.stats()["num_rows_promised"] == 0


def test_the_error_of_one_request_carries_the_others_answers(gru):
    config = CellularConfig(num_rows=16, max_num_tasks=1, launches_in_flight=1)
    cell = Cell(gru, "gru", max_batch=1, batch_sizes=(1,))
    with CellularEngine([cell], unfold_with(gru), config, progress=False) as engine:
        (worker,) = engine.workers
        worker.programs.compiled = {
            key: Broken(one, deletes=False) for key, one in worker.programs.compiled.items()
        }
        with pytest.raises(LaunchFailedError, match="planted") as caught:
            engine.run([[1, 2, 3], [4, 5], [8, 9]])
        assert caught.value.outputs is not None
        assert [one is None for one in caught.value.outputs] == [True, False, False]
        np.testing.assert_allclose(caught.value.outputs[2].states[0]["h"], by_loop(gru, [8, 9]), atol=2e-5)
