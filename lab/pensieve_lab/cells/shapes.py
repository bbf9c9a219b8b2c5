"""Models without numbers: cells by name, and request graphs given only by lengths or trees.

Owns: what virtual time needs to know of LSTM, Seq2Seq and TreeLSTM.
Does not know: how they compute, which `model_defs.recurrent` does.
Called by the simulations of cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.cellular.cells import Cell, CellTypes, Field, Int
from pensieve_jax.cellular.graph import Graph
from pensieve_lab.workload.structures import TreeShape

_STATE: dict[str, Field] = {"state": Int()}


class _Cell:
    """Cell with a single kind of state."""

    def __init__(self, num_inputs: int, *, takes_word: bool) -> None:
        self.state = _STATE
        self.inputs = (_STATE,) * num_inputs
        self.immediates = ("token",) if takes_word else ()


class Shape(NamedTuple):
    """A model.

    Attributes:
      types: its cells.
      unfold: adds a request to a graph.
    """

    types: CellTypes
    unfold: Callable[[Any, Graph], None]


def lstm(max_batch: int = 512) -> Shape:
    """Return the LSTM; a request is a number of words."""
    cell = _Cell(1, takes_word=True)

    def unfold(num_words: int, graph: Graph) -> None:
        graph.returns(graph.chain(cell, np.zeros(num_words, np.int32))[-1])

    return Shape(CellTypes([Cell(cell, "lstm", max_batch)]), unfold)


def seq2seq(encoder_max_batch: int = 512, decoder_max_batch: int = 256) -> Shape:
    """Return Seq2Seq; a request is the source and target lengths, which schedulers do not know."""
    encoder, decoder = _Cell(1, takes_word=True), _Cell(1, takes_word=False)
    cells = [Cell(encoder, "encoder", encoder_max_batch), Cell(decoder, "decoder", decoder_max_batch, 1)]

    def unfold(lengths: tuple[int, int], graph: Graph) -> None:
        source, target = lengths
        encoded = graph.chain(encoder, np.zeros(source, np.int32))
        graph.returns(graph.chain(decoder, num=target, after=encoded[-1])[-1])

    return Shape(CellTypes(cells), unfold)


def tree_lstm(max_batch: int = 64) -> Shape:
    """Return TreeLSTM; a request is a `TreeShape`."""
    leaf, inner = _Cell(0, takes_word=True), _Cell(2, takes_word=False)
    cells = [Cell(leaf, "leaf", max_batch), Cell(inner, "inner", max_batch, 1)]

    def unfold(tree: TreeShape, graph: Graph) -> None:
        words = np.zeros(tree.num_leaves, np.int32)
        last = graph.nodes(leaf, np.empty((tree.num_leaves, 0), np.int64), token=words)[-1]
        if len(tree.children):
            last = graph.nodes(inner, tree.children)[-1]
        graph.returns(last)

    return Shape(CellTypes(cells), unfold)
