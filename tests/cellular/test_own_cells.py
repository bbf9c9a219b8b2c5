"""Users' cells, each compared with a plain loop: shared weights, inputs, states and emitted values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pensieve_jax.cellular import (
    Cell,
    CellError,
    CellOutput,
    CellularConfig,
    CellularEngine,
    Float,
    Graph,
    Int,
)
from tests.seeds import new_seed

SIZE, VOCAB = 8, 20


def serve(modules: dict[str, Any], unfold: Callable[..., None], requests: Sequence[Any]) -> list[CellOutput]:
    """Run the requests on two devices, in batches of one size."""
    cells = [Cell(module, name, 4, batch_sizes=(4,)) for name, module in modules.items()]
    config = CellularConfig(num_rows=64, num_devices=2, max_num_tasks=2)
    with CellularEngine(cells, unfold, config, progress=False) as engine:
        return engine.run(requests)


def sentences(num: int = 20) -> list[list[int]]:
    rng = random.Random(new_seed())
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(num)]


class Rnn(nnx.Module):
    """Cell whose weights another cell shares."""

    state: ClassVar = {"h": Float(SIZE)}
    immediates = ("token",)

    def __init__(self, embed: nnx.Embed, rngs: nnx.Rngs) -> None:
        self.embed, self.inner = embed, nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, inputs: Any, token: jax.Array) -> dict[str, jax.Array]:
        return {"h": jnp.tanh(self.embed(token) + self.inner(inputs[0]["h"]))}


def test_two_cells_may_share_weights() -> None:
    """An embedding in both directions of a sentence, and a cell whose state has the same kind in both."""
    rngs = nnx.Rngs(0)
    embed = nnx.Embed(VOCAB, SIZE, rngs=rngs)
    forward, backward = Rnn(embed, rngs), Rnn(embed, rngs)

    def unfold(words: list[int], graph: Graph) -> None:
        graph.returns(graph.chain(forward, words)[-1], graph.chain(backward, words[::-1])[-1])

    requests = sentences()
    for words, output in zip(
        requests, serve({"forward": forward, "backward": backward}, unfold, requests), strict=True
    ):
        for cell, order, found in ((forward, words, 0), (backward, words[::-1], 1)):
            h = jnp.zeros((1, SIZE))
            for word in order:
                h = cell(({"h": h},), jnp.array([word]))["h"]
            np.testing.assert_allclose(output.states[found]["h"], h[0], atol=2e-5)


def test_one_module_under_two_names() -> None:
    """Each name is batched separately."""
    rngs = nnx.Rngs(0)
    module = Rnn(nnx.Embed(VOCAB, SIZE, rngs=rngs), rngs)

    def unfold(words: list[int], graph: Graph) -> None:
        graph.returns(graph.chain("second", words, after=graph.chain("first", words)[-1])[-1])

    requests = sentences()
    for words, output in zip(
        requests, serve({"first": module, "second": module}, unfold, requests), strict=True
    ):
        h = jnp.zeros((1, SIZE))
        for word in words * 2:
            h = module(({"h": h},), jnp.array([word]))["h"]
        np.testing.assert_allclose(output.states[0]["h"], h[0], atol=2e-5)


class Word(nnx.Module):
    """A leaf: its only inputs are immediates."""

    state: ClassVar = {"v": Float(SIZE, dtype="bfloat16")}
    inputs: ClassVar = ()
    immediates = ("token", "place")

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, SIZE, rngs=rngs)

    def __call__(self, inputs: Any, token: jax.Array, place: jax.Array) -> dict[str, jax.Array]:
        del inputs
        return {"v": (self.embed(token) * (1 + place[:, None])).astype(jnp.bfloat16)}


class Attend(nnx.Module):
    """Reads two kinds, leaves one of them in bfloat16, and emits two fields of different dtypes."""

    state: ClassVar = {"m": Float(SIZE, dtype="bfloat16"), "best": Int(), "score": Float()}
    inputs: ClassVar = (Word.state, state)
    emits = ("best", "score")

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(2 * SIZE, SIZE, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, inputs: Any) -> dict[str, jax.Array]:
        word, before = inputs
        m = jnp.tanh(self.mix(jnp.concatenate([word["v"], before["m"]], axis=-1)))
        wide = m.astype(jnp.float32)
        return {"m": m, "best": wide.argmax(axis=-1).astype(jnp.int32), "score": wide.max(axis=-1)}


@pytest.mark.long
def test_a_cell_may_have_two_kinds_of_input_and_emit_two_fields() -> None:
    """Every word is a leaf of immediates alone; above them is a cell with another kind of state."""
    rngs = nnx.Rngs(0)
    word, attend = Word(rngs), Attend(rngs)

    def unfold(words: list[int], graph: Graph) -> None:
        leaves = graph.nodes(word, np.empty((len(words), 0), int), token=words, place=range(len(words)))
        top = None
        for leaf in leaves:
            top = graph.add(attend, (leaf, top))
        graph.returns(top)

    requests = sentences()
    outputs = serve({"word": word, "attend": attend}, unfold, requests)
    for words, output in zip(requests, outputs, strict=True):
        state = {"m": jnp.zeros((1, SIZE), jnp.bfloat16)}
        best, score = [], []
        for place, one in enumerate(words):
            state = attend((word((), jnp.array([one]), jnp.array([place])), state))
            best.append(int(state["best"][0]))
            score.append(float(state["score"][0]))
        found = output.states[0]
        assert found["m"].dtype == jnp.bfloat16 and found["best"].dtype == np.int32
        np.testing.assert_allclose(np.float32(found["m"]), np.float32(state["m"][0]), atol=2e-2)
        assert output.emitted["score"].dtype == np.float32
        np.testing.assert_allclose(output.emitted["score"], score, atol=2e-2)
        assert len(output.emitted["best"]) == len(words)
        assert {*output.emitted["best"].tolist()} <= {*range(SIZE)}


class Noisy(nnx.Module):
    """Has training parts (a generator, dropout and statistics), which must not change."""

    state: ClassVar = {"h": Float(SIZE)}

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(SIZE, rngs=rngs)

    def __call__(self, inputs: Any) -> dict[str, jax.Array]:
        return {"h": self.norm(self.drop(inputs[0]["h"] + 1))}


def test_a_module_of_a_training_program() -> None:
    module = Noisy(nnx.Rngs(0))
    module.eval()
    unfold = lambda num, graph: graph.returns(graph.chain(module, num=num)[-1])  # noqa: E731
    for num, output in zip(range(1, 9), serve({"noisy": module}, unfold, range(1, 9)), strict=True):
        h = jnp.zeros((1, SIZE))
        for _ in range(num):
            h = module(({"h": h},))["h"]
        np.testing.assert_allclose(output.states[0]["h"], h[0], atol=2e-5)


def test_a_function_is_a_cell() -> None:
    """A constant one gets the batch size."""

    def start(inputs: Any, batch: int) -> dict[str, jax.Array]:
        del inputs
        return {"x": jnp.full(batch, 5, jnp.int32)}

    def double(inputs: Any) -> dict[str, jax.Array]:
        return {"x": 2 * inputs[0]["x"]}

    start.state = double.state = {"x": Int()}  # type: ignore[attr-defined]
    start.inputs = ()  # type: ignore[attr-defined]

    def unfold(num: int, graph: Graph) -> None:
        graph.returns(graph.chain(double, num=num, after=graph.add(start))[-1])

    outputs = serve({"start": start, "double": double}, unfold, range(1, 9))
    assert [int(one.states[0]["x"]) for one in outputs] == [5 * 2**num for num in range(1, 9)]


class Mixed(nnx.Module):
    """A cell whose rows depend on each other."""

    state: ClassVar = {"h": Float(8)}
    immediates = ("token",)

    def __init__(self, kind: str) -> None:
        rngs = nnx.Rngs(0)
        self.kind = kind
        self.dropout, self.norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, inputs: Any, token: jax.Array) -> dict[str, jax.Array]:
        h = inputs[0]["h"] + token[:, None]
        if self.kind == "mean":
            return {"h": h + h.mean(axis=0)}
        if self.kind == "trace":  # the dependence stays small, however large the other rows are
            return {"h": 0.9 * h + 0.01 * jnp.tanh(h).mean(axis=0)}
        if self.kind == "trace in bfloat16":
            half = h.astype(jnp.bfloat16)
            return {"h": (half + 0.01 * half.mean(axis=0)).astype(jnp.float32)}
        return {"h": self.dropout(h) if self.kind == "dropout" else self.norm(h)}


@pytest.mark.parametrize("kind", ["dropout", "norm", "mean", "trace", "trace in bfloat16"])
def test_cells_whose_rows_depend_on_each_other_are_refused(kind: str) -> None:
    """Otherwise an answer would depend on other requests."""
    cell = Mixed(kind)

    def unfold(words: list[int], graph: Graph) -> None:
        graph.returns(graph.chain(cell, words)[-1])

    def engine() -> CellularEngine:
        config = CellularConfig(max_num_tasks=1)
        return CellularEngine([Cell(cell, "mixed", 2, batch_sizes=(2,))], unfold, config, progress=False)

    with pytest.raises(
        CellError, match=r"mixed.state\['h'\] is 'a row that depends on the rest of its batch'"
    ):
        engine()
    cell.eval()
    if kind in ("dropout", "norm"):
        with engine() as served:
            assert len(served.run([[1], [2, 3]])) == 2
