"""Storage of the graphs of one `submit_many`, as pieces of nodes that were added together.

Owns: the stored data of nodes, and the labels of subgraphs, which may be merged.
Does not know: how graphs are written or checked, or the columns derived from them.
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
    """Nodes that were added together: a chain, or nodes with explicit inputs.

    Attributes:
      start: id of the first node.
      kind: index of their type.
      label: label of their subgraph, before merged labels are resolved; with
        `nodes_are_subgraphs`, the first node's.
      nodes_are_subgraphs: whether each node is a subgraph of its own, with consecutive labels.
      stage: stage of their subgraph.
      after: node that the first node of a chain reads; `NO_NODE` is the initial state.
      inputs: i64[n, fan_in]; None for a chain.
      stop: emitted value that ends a chain early; None if it cannot end early.
    """

    start: int
    kind: int
    label: int
    nodes_are_subgraphs: bool
    stage: int
    after: int
    inputs: np.ndarray | None
    stop: int | None


class GraphBatch:
    """Graphs of all requests. Node ids count across all of them.

    Attributes:
      types: the cells.
      pieces: pieces in order.
      starts: first node of each piece.
      num_nodes: nodes of all pieces.
      immediates: for each immediate, i32 arrays of the nodes of each piece.
      returned: nodes whose states are returned.
      places: index of each returned node in its request's result.
      ends: numbers of nodes, labels and returned nodes up to the end of each request.
      has_only_chains: whether each piece is a chain and a subgraph of its own, and only last nodes are
        returned.
      joined: parent of every label in the union-find of merged labels; a root is its own parent.
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
        """Add a piece of `num` nodes. `add_immediates` adds their immediates."""
        self.pieces.append(piece)
        self.starts.append(piece.start)
        self.num_nodes += num

    def add_immediates(self, num: int, values: Sequence[np.ndarray]) -> None:
        """Add the immediates of `num` nodes. Missing columns are filled with zeros."""
        for place, column in enumerate(self.immediates):
            column.append(values[place] if place < len(values) else np.zeros(num, INT32))

    @property
    def only_sentence(self) -> tuple[int, int] | None:
        """Type and length of the only request, if it is one chain that returns its last state; else None."""
        if len(self.pieces) > 1 or self.returned != [self.num_nodes - 1] or not self.has_only_chains:
            return None
        (only,) = self.pieces
        return None if only.stop is not None else (only.kind, self.num_nodes)

    def piece(self, node: int) -> Piece:
        """Return the piece of a node."""
        last = self.pieces[-1]  # the usual case
        return last if node >= last.start else self.pieces[self.index(node)]

    def index(self, node: int) -> int:
        """Return the index of a node's piece."""
        return bisect_right(self.starts, node) - 1

    def new_label(self) -> int:
        """Return an unused label."""
        self.joined.append(len(self.joined))
        return self.joined[-1]

    def label(self, node: int) -> int:
        """Return the label of a node's subgraph."""
        piece = self.piece(node)
        return piece.label + (node - piece.start if piece.nodes_are_subgraphs else 0)

    def root(self, label: int) -> int:
        """Return the root of all labels that were merged with this one."""
        while self.joined[label] != label:
            label = self.joined[label]
        return label
