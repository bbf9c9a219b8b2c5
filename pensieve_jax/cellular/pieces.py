"""What was added to the graphs of one `submit_many`, piece by piece.

Owns: what is kept of nodes, and labels of subgraphs, of which several may turn out to be one.
Does not know: how graphs are written or checked, or what follows from them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.integers import INT32

NO_NODE = -1
NEW_LABEL = -2


class Piece(NamedTuple):
    """Nodes that were added together: a chain, or nodes with their inputs.

    Attributes:
      start: id of the first.
      kind: index of their type.
      label: of their subgraph, before labels that turned out to be one are joined; where each node is a
        subgraph of its own, of the first of them.
      is_apart: whether each node is a subgraph of its own, with labels that follow one another.
      stage: of their subgraph.
      after: what the first of a chain reads; `NO_NODE` is the initial state.
      inputs: i64[n, fan_in] of what is no chain, else None.
      stop: of a chain that may end early, the emitted value that ends it, else None.
    """

    start: int
    kind: int
    label: int
    is_apart: bool
    stage: int
    after: int
    inputs: np.ndarray | None
    stop: int | None


class GraphBatch:
    """Of all requests, one after the other; ids of nodes count through all of them.

    Attributes:
      types: the cells.
      pieces: in order.
      starts: of these.
      num_nodes: in all of them.
      immediates: i32 of all nodes in pieces, for each place a type may have.
      returned: nodes whose states are wanted.
      places: of each of these, its place among its request's.
      ends: number of nodes, number of labels and of returned nodes up to the end of each request.
      has_only_chains: whether each piece is a chain and a subgraph of its own, and no node but the last of
        one is returned.
      joined: for every label another one that it is one with, or itself.
    """

    def __init__(self, types: CellTypes) -> None:
        self.types = types
        self.pieces: list[Piece] = []
        self.starts: list[int] = []
        self.num_nodes = 0
        self.immediates: list[list[np.ndarray]] = [[] for _ in range(types.max_num_immediates)]
        self.returned: list[int] = []
        self.places: list[int] = []
        self.ends: list[tuple[int, int, int]] = []
        self.has_only_chains = True
        self.joined: list[int] = []

    def add_piece(self, num: int, piece: Piece) -> None:
        """Of `num` nodes, whose immediates are added apart."""
        self.pieces.append(piece)
        self.starts.append(piece.start)
        self.num_nodes += num

    def add_immediates(self, num: int, values: Sequence[np.ndarray]) -> None:
        """Of `num` nodes, for the first places; the others' are zeros."""
        for place, column in enumerate(self.immediates):
            column.append(values[place] if place < len(values) else np.zeros(num, INT32))

    @property
    def only_sentence(self) -> tuple[int, int] | None:
        """Type and length of the only request, if that is a chain whose last state it returns."""
        if len(self.pieces) > 1 or self.returned != [self.num_nodes - 1] or not self.has_only_chains:
            return None
        (only,) = self.pieces
        return None if only.stop is not None else (only.kind, self.num_nodes)

    def piece(self, node: int) -> Piece:
        """In which a node is."""
        last = self.pieces[-1]  # which it is, nearly always
        return last if node >= last.start else self.pieces[self.index(node)]

    def index(self, node: int) -> int:
        """Of the piece in which a node is."""
        return bisect_right(self.starts, node) - 1

    def new_label(self) -> int:
        """One that nothing has."""
        self.joined.append(len(self.joined))
        return self.joined[-1]

    def label(self, node: int) -> int:
        """Of a node's subgraph."""
        piece = self.piece(node)
        return piece.label + (node - piece.start if piece.is_apart else 0)

    def root(self, label: int) -> int:
        """The label that stands for all those that are one with this one."""
        while self.joined[label] != label:
            label = self.joined[label]
        return label
