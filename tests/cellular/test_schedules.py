"""Random schedules: joining, leaving or cancelled requests do not change another one's result.

Each answer is bit-identical to that of the request alone in the engine, and close to that of a plain loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs.recurrent import LSTM, Seq2Seq, TreeLSTM
from pensieve_jax.cellular import Cell, CellRequest, CellularConfig, CellularEngine
from tests.models.recurrent.plain import plain
from tests.models.recurrent.test_tree_lstm import random_tree
from tests.seeds import enough, new_seed

VOCAB, HIDDEN, NUM_ROWS = 40, 16, 24
IS_CPU = jax.default_backend() == "cpu"


def requests_of(model: Any, rng: random.Random, num: int) -> list[Any]:
    """Draw short requests, so that they keep coming and leaving."""
    if isinstance(model, TreeLSTM):
        return [model.request(random_tree(rng, rng.randint(1, 7))) for _ in range(num)]
    words = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(num)]
    if isinstance(model, Seq2Seq):
        return [model.request(one, max_extra_steps=rng.randint(0, 6)) for one in words]
    return [model.request(one) for one in words]


def values(request: CellRequest) -> list[np.ndarray]:
    output = request.result()
    states = [state[name] for state in output.states for name in sorted(state)]
    return [*states, *(output.emitted[name] for name in sorted(output.emitted))]


class Bench:
    """A model, its engine, and the result of each request alone."""

    def __init__(self, model: Any, batch_sizes: tuple[int, ...], num_devices: int = 1) -> None:
        cells = [
            Cell(cell.module, cell.name, batch_sizes[-1], cell.priority, batch_sizes)
            for cell in model.cells()
        ]
        # Steps cancel requests at random; if they went on during a compilation, few would end.
        config = CellularConfig(num_rows=NUM_ROWS, num_devices=num_devices, compile_at_start=True)
        self.model = model
        self.engine = CellularEngine(
            cells, model.unfold, config, unfold_many=getattr(model, "unfold_many", None), progress=False
        )

    def alone(self, request: Any) -> list[np.ndarray]:
        (handle,) = self.engine.processor.submit_many([request], self.model.unfold)
        while not handle.done:
            self.engine.step()
        return values(handle)

    def schedule(self, seed: int) -> list[tuple[Any, CellRequest]]:
        """Run requests that join between steps, and cancel a few; return those that ended."""
        rng = random.Random(seed)
        todo, sent = requests_of(self.model, rng, 9), []
        while todo or not all(handle.done for _, handle in sent):
            num = rng.choice([0, 1, 1, 3])
            some, todo = todo[:num], todo[num:]
            sent += zip(some, self.engine.submit_many(some), strict=True)
            if self.engine._loop.held is None:  # one that is held still reads rows that are free already
                poison(self.engine)
            self.engine.step()
            self.engine.wait()  # on a slow device, requests would be cancelled before any of them ends
            if sent and rng.random() < 0.1:
                self.engine.cancel(rng.choice(sent)[1])
        return [(request, handle) for request, handle in sent if handle.error is None]


def poison(engine: CellularEngine) -> None:
    """Fill free rows with NaN, which would spread if a cell read them.

    The number of indices is constant, with repetitions, since each number would compile another program.
    """
    for worker, by_kind in zip(engine.workers, engine.processor.formation.rows, strict=True):
        for kind, rows in enumerate(by_kind):
            free = rows.free_rows()
            if len(free):
                free = np.resize(free, NUM_ROWS)
                worker.pools[kind] = tuple(
                    array if array.dtype == jnp.int32 else array.at[free].set(jnp.nan)
                    for array in worker.pools[kind]
                )


MODELS = {
    "lstm": lambda: LSTM.random(hidden_size=HIDDEN, vocab_size=VOCAB, seed=1),
    "seq2seq": lambda: Seq2Seq.random(hidden_size=HIDDEN, vocab_size=VOCAB, seed=2),
    "tree": lambda: TreeLSTM.random(hidden_size=HIDDEN, vocab_size=VOCAB, seed=3),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_with_one_batch_size(name: str) -> None:
    """Rows of a product do not depend on other rows of the same shape, so other requests change no bit.

    This holds on a CPU. For a GPU, XLA tunes programs of one, two and five tasks separately, so one batch
    size may use several kernels, and other requests determine which one a request runs in.
    """
    bench = Bench(MODELS[name](), (4,))
    check(bench, enough(20, 100), exact=IS_CPU)


@pytest.mark.parametrize("name", ["lstm", pytest.param("seq2seq", marks=pytest.mark.long)])
def test_nearly_with_several(name: str) -> None:
    check(Bench(MODELS[name](), (1, 2, 4)), 8, exact=False)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tree", "seq2seq"])
def test_two_devices_equal_one(name: str) -> None:
    bench = Bench(MODELS[name](), (4,), num_devices=2)
    check(bench, 12, exact=IS_CPU)
    assert bench.engine.stats()["num_moved_rows"] > 0, "no row went from device to device"


def check(bench: Bench, num: int, *, exact: bool) -> None:
    seed = new_seed()
    ended: list[tuple[Any, CellRequest]] = []
    for place in range(num):
        ended += bench.schedule(seed + place)
    assert len(ended) > 5 * num
    by_itself = plain(bench.model)
    for request, handle in ended:
        same(values(handle), bench.alone(request), exact=exact)
        same(values(handle), by_itself(request), exact=False)
    assert bench.engine.stats()["num_rows_promised"] == 0


def same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], *, exact: bool) -> None:
    for one, other in zip(found, expected, strict=True):
        if exact or one.dtype.kind == "i":
            assert (one == other).all()
        else:
            np.testing.assert_allclose(one, other, atol=2e-5)
