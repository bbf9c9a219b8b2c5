"""Cells whose result depends on all of their inputs, and graphs of them, computed by recursion.

Owns the cells, random graphs, and the value of each node of a graph. Does not know batches, rows, or an
engine.
Called by the scenarios and the tests of the policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.cellular.cells import Cell, CellTypes, Field
from pensieve_jax.cellular.errors import GraphError

WIDE, NARROW = {"x": Field((), "int64"), "token": Field((), "int32")}, {"y": Field((), "int64")}
NUM_TOKENS = 6  # so that a chain often ends early


class HashCell:
    """Cell that returns a hash of its name, its inputs and its immediates."""

    def __init__(
        self, salt: int, state: dict[str, Field], inputs: tuple[Any, ...], num_immediates: int
    ) -> None:
        self.salt, self.state, self.inputs = salt, state, inputs
        self.immediates = tuple(f"n{i}" for i in range(num_immediates))
        self.emits = ("token",) if "token" in state else ()

    def compute(self, values: Any) -> np.ndarray:
        """Return i64[B] from i64[fan_in + immediates, B]."""
        result = np.full(values.shape[1], self.salt, np.uint64)
        for one in values.astype(np.uint64):
            result = (result ^ one) * np.uint64(0x9E3779B97F4A7C15)
            result ^= result >> np.uint64(29)
        return result.astype(np.int64)


def token(value: np.ndarray) -> np.ndarray:
    """Return the token that is emitted with a value."""
    return (value % NUM_TOKENS).astype(np.int32)


def make_cells(batches: dict[str, int]) -> list[Cell]:
    """Return a chain's cell, a decoder of the same state, a tree's two, and one that joins two kinds.

    Args:
        batches: the largest batch, by name.
    """
    modules = {
        "step": HashCell(1, WIDE, (WIDE,), 1),
        "decode": HashCell(2, WIDE, (WIDE,), 0),
        "leaf": HashCell(3, NARROW, (), 1),
        "inner": HashCell(4, NARROW, (NARROW, NARROW), 0),
        "join": HashCell(5, WIDE, (NARROW, WIDE, NARROW), 2),
        "narrow": HashCell(6, NARROW, (WIDE,), 0),
    }
    priorities = {"decode": 1, "inner": 2}
    return [Cell(module, name, batches[name], priorities.get(name, 0)) for name, module in modules.items()]


class Node(NamedTuple):
    """One node of a drawn graph."""

    name: str
    inputs: tuple[int | None, ...]
    immediates: tuple[int, ...]
    stop: int | None = None
    chain_end: int = -1


@dataclass
class Drawn:
    """A request: its nodes, and the calls that build a graph of them.

    Attributes:
        vector: the graph method that adds many such requests, and its arguments for this one; None if there
            is no such method.
    """

    nodes: list[Node] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    vector: tuple[str, tuple[np.ndarray, ...]] | None = None

    def unfold(self, graph: Any) -> None:
        """Build the graph as a user's function does."""
        for method, args, options in self.calls:
            getattr(graph, method)(*args, **options)
        if self.returned:
            graph.returns(*self.returned)

    def expected(self, types: CellTypes) -> tuple[list[int], list[int]]:
        """Return the values of returned nodes, and the tokens, by recursion."""
        values: dict[int, int] = {}

        def value(index: int | None) -> int:
            if index is None:
                return 0
            if index not in values:
                node = self.nodes[index]
                words = [[value(one)] for one in node.inputs] + [[one] for one in node.immediates]
                module = types.cells[types.find(node.name).index].module
                values[index] = int(module.compute(np.array(words, np.int64).reshape(-1, 1))[0])
            return values[index]

        tokens, skip_to = [], 0
        for index, node in enumerate(self.nodes):
            if index < skip_to or not types.find(node.name).emits:
                continue
            tokens.append(int(token(np.int64(value(index)))))
            if node.stop == tokens[-1]:
                skip_to = node.chain_end
        return [value(index) for index in self.returned], tokens


def unfold_many(requests: Sequence[Drawn], graph: Any) -> None:
    """Build all graphs by vector calls if every request has one."""
    cells = {"sentences": ("step",), "trees": ("leaf", "inner")}
    if any(one.vector is None for one in requests):
        raise GraphError("requests", requests, "sentences and trees")
    for method, group in itertools.groupby((one.vector for one in requests), key=lambda one: one[0]):
        columns = zip(*(arrays for _, arrays in group), strict=True)
        getattr(graph, method)(*cells[method], *map(list, columns))


def draw(rng: np.random.Generator, shapes: str) -> Drawn:
    """Draw a request of a shape: a chain "c", encoder and decoder "e", a tree "t", any graph "a"."""
    drawers = {"c": _chain, "e": _encoder_decoder, "t": _tree, "a": _any}
    return drawers[shapes[rng.integers(len(shapes))]](rng)


def _chain(rng: np.random.Generator) -> Drawn:
    drawn = Drawn()
    _add_chain(drawn, rng, "step", int(rng.integers(1, 12)), None, None)
    drawn.returned = [len(drawn.nodes) - 1] if rng.random() < 0.8 else []
    if rng.random() < 0.05 and len(drawn.nodes) > 1:
        drawn.returned.append(int(rng.integers(len(drawn.nodes) - 1)))
    if drawn.returned == [len(drawn.nodes) - 1]:
        words = np.array([node.immediates[0] for node in drawn.nodes], np.int32)
        drawn.vector = "sentences", (words,)
    return drawn


def _encoder_decoder(rng: np.random.Generator) -> Drawn:
    """Draw a translation; some have a head after the decoder, with another kind of state."""
    drawn = Drawn()
    _add_chain(drawn, rng, "step", int(rng.integers(1, 9)), None, None)
    stop = int(rng.integers(NUM_TOKENS)) if rng.random() < 0.7 else None
    _add_chain(drawn, rng, "decode", int(rng.integers(1, 15)), len(drawn.nodes) - 1, stop)
    if rng.random() < 0.05:  # another decoder of the same source
        drawn.returned = [0]
        _add_chain(drawn, rng, "decode", int(rng.integers(1, 9)), 0, stop)
    elif stop is None and rng.random() < 0.5:
        _add_chain(drawn, rng, "narrow", 1, len(drawn.nodes) - 1, None)
        drawn.returned = [len(drawn.nodes) - 1]
    return drawn


def _tree(rng: np.random.Generator) -> Drawn:
    """Draw a tree of any shape, built by vectors or node by node."""
    drawn = Drawn()
    num = int(rng.integers(1, 10))
    words = [int(one) for one in rng.integers(1000, size=num)]
    open_nodes = list(range(num))
    children = []
    while len(open_nodes) > 1:
        left, right = (open_nodes.pop(int(rng.integers(len(open_nodes)))) for _ in range(2))
        children.append((left, right))
        open_nodes.append(num + len(children) - 1)
    drawn.nodes = [Node("leaf", (), (word,)) for word in words]
    drawn.nodes += [Node("inner", pair, ()) for pair in children]
    if rng.random() < 0.5:
        drawn.calls.append(("nodes", ("leaf", np.empty((num, 0), int)), {"n0": words}))
        if children:
            drawn.calls.append(("nodes", ("inner", np.array(children)), {}))
    else:
        drawn.calls += [("add", ("leaf",), {"n0": word}) for word in words]
        drawn.calls += [("add", ("inner", pair), {}) for pair in children]
    drawn.returned = [len(drawn.nodes) - 1]
    drawn.vector = "trees", (np.array(words, np.int32), np.array(children, np.int64).reshape(-1, 2))
    return drawn


def _any(rng: np.random.Generator) -> Drawn:
    """Draw nodes of all types whose inputs are any earlier ones of the kind."""
    drawn = Drawn()
    kinds = {"step": "w", "decode": "w", "leaf": "n", "inner": "n", "join": "w", "narrow": "n"}
    inputs = {"step": "w", "decode": "w", "leaf": "", "inner": "nn", "join": "nwn", "narrow": "w"}
    num_immediates = {"step": 1, "leaf": 1, "join": 2}
    for _ in range(int(rng.integers(1, 16))):
        name = str(rng.choice(list(kinds)))
        sources: list[int | None] = []
        for kind in inputs[name]:
            fitting = [i for i, node in enumerate(drawn.nodes) if kinds[node.name] == kind]
            sources.append(int(rng.choice(fitting)) if fitting and rng.random() < 0.85 else None)
        numbers = tuple(int(one) for one in rng.integers(-1000, 1000, num_immediates.get(name, 0)))
        drawn.nodes.append(Node(name, tuple(sources), numbers))
        drawn.calls.append(("add", (name, tuple(sources)), {f"n{i}": one for i, one in enumerate(numbers)}))
    num = int(rng.integers(0, min(4, len(drawn.nodes)) + 1))
    drawn.returned = [int(one) for one in rng.permutation(len(drawn.nodes))[:num]]
    if not drawn.returned and all(kinds[node.name] == "n" for node in drawn.nodes):
        drawn.returned = [0]  # otherwise it would have no result
    return drawn


def _add_chain(
    drawn: Drawn, rng: np.random.Generator, name: str, num: int, after: int | None, stop: int | None
) -> None:
    start = len(drawn.nodes)
    words = [int(one) for one in rng.integers(1000, size=num)] if name == "step" else None
    for i in range(num):
        source = after if i == 0 else start + i - 1
        immediates = (words[i],) if words else ()
        drawn.nodes.append(Node(name, (source,), immediates, stop, start + num if stop is not None else -1))
    options = {"after": after, "until": stop} | ({} if words else {"num": num})
    given = np.array(words, np.int32) if words and rng.random() < 0.5 else words
    drawn.calls.append(("chain", (name, given) if words else (name,), options))
