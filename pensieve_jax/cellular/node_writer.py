"""Addition of nodes to the graph of a request: their checks, and their assignment to subgraphs.

Owns: the current request, the checks of its nodes, and their stages and labels.
Does not know: the methods for users.

A subgraph consists of connected nodes of one type. All its inputs from other subgraphs are available when it
begins (thesis, section 2.4.3). Each node has a *stage*: at least that of each input, and at least one more
than that of an input of another type. Connected nodes of one type and stage form a subgraph. Stages rise
between subgraphs, so no subgraph waits for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.errors import CapacityError, CellError, GraphError, UnfoldError
from pensieve_jax.cellular.graph_batch import NEW_LABEL, NO_NODE, GraphBatch, Piece
from pensieve_jax.cellular.integers import int32s, is_int32


class NodeWriter(GraphBatch):
    """Writer of nodes. Node ids count from 0 within the current request."""

    def __init__(self, types: CellTypes, *, max_nodes: int) -> None:
        super().__init__(types)
        self._max_nodes = max_nodes
        self._base = 0
        self._returned_here: set[int] = set()
        self._is_open = False

    def _check_open(self) -> None:
        """Raise UnfoldError unless a request has begun and not ended."""
        if not self._is_open:
            limit = "called once for each request, and nodes added between begin and end"
            raise UnfoldError("end", "called before", limit)

    def _emits(self) -> bool:
        """Return whether any cell of this request emits a field."""
        first = bisect_left(self.starts, self._base)
        return any(self.types.types[piece.kind].emits for piece in self.pieces[first:])

    def _find(self, cell: Any) -> CellType:
        try:
            return self.types.find(cell)
        except CellError as error:
            own = self.num_nodes - self._base
            raise CellError(f"nodes[{own}].{error.field}", error.value, error.limit) from error

    def _check_until(self, kind: CellType, until: Any) -> None:
        """Check `until`. It is compared bit by bit with the first emitted field, which must be an integer."""
        if not kind.emits:
            raise self._bad("until", until, f"None: {kind.name} emits nothing")
        dtype = kind.emits[0][1]
        if np.dtype(dtype).kind not in "iu":
            raise self._bad("until", until, f"None: {kind.name} first emits {dtype}, not ints")
        if not is_int32(until):
            raise self._bad("until", until, "an int of 32 bits")

    def _one(
        self, kind: CellType, ids: np.ndarray, immediates: dict[str, Sequence[int] | np.ndarray]
    ) -> range:
        """Add one node, which may merge several subgraphs into one."""
        sources = [
            self._source(kind, i, None if one == NO_NODE else one) for i, one in enumerate(ids[0].tolist())
        ]
        pieces = [self.piece(source) for source in sources if source != NO_NODE]
        stage = max((piece.stage + (piece.kind != kind.index) for piece in pieces), default=0)
        labels = {
            self.root(self.label(source))
            for source, piece in zip((one for one in sources if one != NO_NODE), pieces, strict=True)
            if piece.kind == kind.index and piece.stage == stage
        }
        label = min(labels, default=NEW_LABEL)
        added = self._append(kind, 1, label, stage, NO_NODE, np.array([sources]), None, immediates)
        for other in labels:
            self.joined[other] = label
        return added

    def _uniform(self, kind: CellType, ids: np.ndarray, own: int) -> int | None:
        """Return the stage of nodes that certainly form a new subgraph; None if a slower check is needed.

        They form a tree: each but the last is read by exactly one of them, and all their other inputs are of
        other types and of one stage.
        """
        is_inner = ids >= own
        inner, outer = ids[is_inner], ids[~is_inner]
        if len(inner) != len(ids) - 1 or len(np.unique(inner)) < len(inner):
            return None
        if outer.min() == NO_NODE:  # not empty, since the first node reads no node of this call
            return None
        first, last = self.index(self._base + int(outer.min())), self.index(self._base + int(outer.max()))
        between = self.pieces[first : last + 1]
        stages = {piece.stage for piece in between}
        if len(stages) > 1 or any(piece.kind == kind.index for piece in between):
            return None
        return stages.pop() + 1

    def _check_kinds(self, kind: CellType, ids: np.ndarray, own: int) -> None:
        for slot in range(ids.shape[1]):
            for source in {self.index(self._base + one) for one in ids[:, slot].tolist() if one < own}:
                self._check_kind(kind, slot, self.pieces[source], None)
            if (ids[:, slot] >= own).any() and kind.input_kinds[slot] != kind.state_kind:
                raise self._bad(f"inputs[{slot}]", kind.name, "a cell of the kind that this input reads")

    def _source(self, kind: CellType, slot: int, node: int | None) -> int:
        """Return the id, counted across all requests, of the node that an input reads."""
        if node is None:
            return NO_NODE
        self._check_node(f"inputs[{slot}]", node)
        node = int(node)  # a narrow numpy type could overflow in the sum below
        self._check_kind(kind, slot, self.piece(self._base + node), node)
        return self._base + node

    def _check_kind(self, kind: CellType, slot: int, source: Piece, node: int | None) -> None:
        found = self.types.types[source.kind]
        if source.stop is not None:
            raise self._bad(f"inputs[{slot}]", node, "a node outside of chains that may end early")
        if found.state_kind != kind.input_kinds[slot]:
            expected = dict(self.types.kinds[kind.input_kinds[slot]])
            hint = f"the state of {found.name} is {dict(self.types.kinds[found.state_kind])}"
            raise self._bad(f"inputs[{slot}]", node, f"a node with the state {expected}", hint=hint)

    def _check_node(self, field: str, node: Any, *, is_source: bool = True) -> None:
        num = self.num_nodes - self._base
        if type(node) is int and 0 <= node < num:
            return
        if not isinstance(node, np.integer) or not 0 <= node < num:
            known = f"an int from 0 to {num - 1}" if num else "which has none yet"
            earlier = "an earlier node" if is_source else "a node"
            raise self._bad(field, node, f"{earlier} of this request, {known}", 0 if is_source else None)

    def _append(
        self,
        kind: CellType,
        num: int,
        label: int | None,
        stage: int,
        after: int,
        inputs: np.ndarray | None,
        stop: int | None,
        immediates: dict[str, Sequence[int] | np.ndarray],
    ) -> range:
        """Add nodes of one label. None makes each its own subgraph; `NEW_LABEL` takes an unused label."""
        self._check_open()
        own = self.num_nodes - self._base
        if own + num > self._max_nodes:
            raise CapacityError(
                f"nodes[{own}]", own + num, f"at most max_nodes ({self._max_nodes}) of a request"
            )
        if len(immediates) != len(kind.immediates) or immediates.keys() != {*kind.immediates}:
            raise self._bad("immediates", sorted(immediates), f"{list(kind.immediates)}, for {kind.name}")
        self._append_immediates(kind, num, immediates)
        nodes_are_subgraphs = label is None
        if label is None:
            label = len(self.joined)
            self.joined.extend(range(label, label + num))
        elif label == NEW_LABEL:
            label = self.new_label()
        self.add_piece(
            num, Piece(self.num_nodes, kind.index, label, nodes_are_subgraphs, stage, after, inputs, stop)
        )
        return range(own, own + num)

    def _append_immediates(
        self, kind: CellType, num: int, immediates: dict[str, Sequence[int] | np.ndarray]
    ) -> None:
        found = []
        for name in kind.immediates:
            values = int32s(immediates[name])
            if values is None or len(values) != num:
                raise self._bad(name, immediates[name], ints(num))
            found.append(values)
        self.add_immediates(num, found)

    def _bad(self, field: str, value: Any, limit: str, node: int | None = 0, hint: str = "") -> GraphError:
        """Return an error of the next node, or of the one `node` places after it; None names no node."""
        own = self.num_nodes - self._base + (node or 0)
        return GraphError(field if node is None else f"nodes[{own}].{field}", value, limit, hint)


def ints(num: int) -> str:
    """Describe a number of integers for an error text."""
    return f"{num} ints of 32 bits" if num > 1 else "one int of 32 bits"
