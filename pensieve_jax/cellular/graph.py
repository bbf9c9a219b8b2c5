"""The graph of a request: its cells and what each reads. A user's function writes it, here.

Owns: the methods that add nodes, their checks, and which subgraph a node belongs to.
Does not know: when anything runs, or other requests' graphs, though it holds those of one `submit_many`.
Called by: whoever unfolds a request, and `admission`.

A subgraph is connected nodes of one type whose inputs from elsewhere are all available when it begins
(thesis, section 2.4.3). Nodes get a *stage*: one more than that of an input of another type, and no less than
that of any input. Connected nodes of one type and stage are a subgraph; between subgraphs stages rise, so
none of them waits for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.errors import CapacityError, CellError, GraphError
from pensieve_jax.cellular.integers import INT32, int32s, is_int32
from pensieve_jax.cellular.many import add_sentences, add_trees
from pensieve_jax.cellular.pieces import NO_NODE, Piece, Pieces


class Graph(Pieces):
    """Graphs of requests, one after the other; a method's ids are those of the request at hand, from 0."""

    def __init__(self, types: CellTypes, *, max_nodes: int) -> None:
        """Nothing yet."""
        super().__init__(types)
        self._max_nodes = max_nodes
        self._base = 0
        self._returned_here: set[int] = set()
        self._is_open = False

    def add(self, cell: Any, inputs: Sequence[int | None] = (), **immediates: int) -> int:
        """One node; returns its id.

        Args:
          cell: a `Cell`, its module, or its name.
          inputs: ids of nodes, one for each input of the cell; None is the initial state, zeros.
          **immediates: the numbers that the cell takes.

        Raises:
          GraphError: an input that is no node yet or of another kind, or an immediate too many, too few or no
            i32.
        """
        kind = self._find(cell)
        if not isinstance(inputs, Sequence | np.ndarray) or len(inputs) != len(kind.input_kinds):
            raise self._bad("inputs", inputs, f"a sequence of {len(kind.input_kinds)}, for {kind.name}")
        for slot, one in enumerate(inputs):
            if one is not None and not is_int32(one):
                raise self._bad(f"inputs[{slot}]", one, "the id of a node, or None")
        ids = np.array([[NO_NODE if one is None else one for one in inputs]], np.int64)
        return self.nodes(kind, ids, **{name: [value] for name, value in immediates.items()})[0]

    def chain(
        self,
        cell: Any,
        words: Sequence[int] | np.ndarray | None = None,
        *,
        num: int | None = None,
        after: int | None = None,
        until: int | None = None,
        **immediates: Sequence[int] | np.ndarray,
    ) -> range:
        """Nodes each of which reads the one before it; returns their ids.

        Args:
          cell: of one input.
          words: the cell's first immediate, for each node.
          num: how many nodes; needed for a cell without immediates.
          after: what the first one reads; None is the initial state.
          until: a value of the first field that the cell emits; the node that emits it is the last one. `num`
            is then how many there are at most, and no other node may read one of them.
          **immediates: by name, a value for each node.

        Raises:
          GraphError: see `add`.
        """
        kind = self._find(cell)
        if after is None and until is None and num is None and not immediates:
            found = self._sentence(kind, words)
            if found is not None:
                return found
        if len(kind.input_kinds) != 1:
            raise self._bad("inputs", len(kind.input_kinds), f"one input; {kind.name} makes no chain")
        if words is not None:
            if not kind.immediates:
                raise self._bad("words", words, f"absent: {kind.name} takes no immediates")
            immediates = {kind.immediates[0]: words, **immediates}
        if num is None:
            if not immediates:
                raise self._bad("num", num, "a number of nodes, where there are no immediates")
            name, values = next(iter(immediates.items()))
            if not isinstance(values, Sized):
                raise self._bad(name, values, "a sequence of ints, where num is not given")
            num = len(values)
        source = self._source(kind, 0, after)
        if until is not None:
            self._check_until(kind, until)
        if not is_int32(num) or num < 1:
            raise self._bad("num", num, "an int of at least 1")
        if num > 1 and not kind.is_chained:
            raise self._bad("num", num, f"1: {kind.name} does not read what it leaves")
        stage, label = 0, None
        if source != NO_NODE:
            piece = self.piece(source)
            stage = piece.stage
            if piece.kind == kind.index:
                label = self.label(source)
                self.has_only_chains = False
            else:
                stage += 1
        label = self.new_label() if label is None else label
        return self._append(kind, num, label, stage, source, None, until, immediates)

    def _sentence(self, kind: CellType, words: Any) -> range | None:
        """A chain of words from the initial state, as most requests are; None if it is not that."""
        if type(words) is not np.ndarray or words.dtype != INT32 or words.ndim != 1:
            return None
        if not kind.is_chained or len(kind.immediates) != 1:
            return None
        num, own = len(words), self.num_nodes - self._base
        if not num or own + num > self._max_nodes:
            return None
        self.add_immediates(num, [words.copy()])
        self.add_piece(
            num, Piece(self.num_nodes, kind.index, self.new_label(), False, 0, NO_NODE, None, None)
        )
        return range(own, own + num)

    def sentences(self, cell: Any, words: Sequence[np.ndarray]) -> None:
        """For each of these a request of its own: a chain of all its words, whose last state it returns.

        Args:
          cell: of one input and one immediate.
          words: i32[n] of each.

        Raises:
          GraphError: this is not what they are, one by one it may be told why; or `unfold` called it.
        """
        self._check_closed("sentences")
        add_sentences(self, self._find(cell), words, self._max_nodes)

    def trees(
        self, leaf: Any, inner: Any, words: Sequence[np.ndarray], children: Sequence[np.ndarray]
    ) -> None:
        """For each of these a request of its own: a tree whose root's state it returns.

        Args:
          leaf: of no input and one immediate.
          inner: of inputs of the kind that both leave, and no immediate.
          words: i32[n] of each tree, one for each leaf; these are its nodes 0 to n - 1.
          children: int[m, fan_in] of each tree, earlier nodes of it; these are its nodes n on, the root last.

        Raises:
          GraphError: this is not what they are, one by one it may be told why; or `unfold` called it.
        """
        self._check_closed("trees")
        add_trees(self, self._find(leaf), self._find(inner), words, children, self._max_nodes)

    def nodes(self, cell: Any, inputs: np.ndarray, **immediates: Sequence[int] | np.ndarray) -> range:
        """Nodes with inputs of their own; returns their ids.

        Args:
          cell: of any number of inputs.
          inputs: int[n, fan_in], ids of earlier nodes, or of earlier ones among these; `NO_NODE` is the
            initial state.
          **immediates: by name, a value for each node.

        Raises:
          GraphError: see `add`; what is no earlier node would close a cycle, or does not exist.
        """
        kind = self._find(cell)
        ids = np.asarray(inputs)
        is_table = ids.ndim == 2 and ids.shape[1] == len(kind.input_kinds) and len(ids) > 0
        if not is_table or ids.dtype.kind not in "iu":
            raise self._bad("inputs", inputs, f"ints [n, {len(kind.input_kinds)}], for {kind.name}")
        self.has_only_chains = False
        num, own = len(ids), self.num_nodes - self._base
        first_bad = np.argwhere((ids < NO_NODE) | (ids >= own + np.arange(num)[:, None]))
        if len(first_bad):
            node, slot = (int(i) for i in first_bad[0])
            raise self._bad(
                f"inputs[{slot}]", int(ids[node, slot]), "an earlier node: there are no cycles", node
            )
        ids = ids.astype(np.int64)
        if not ids.size or (ids == NO_NODE).all():
            return self._append(kind, num, None, 0, NO_NODE, ids, None, immediates)
        if num == 1:
            return self._one(kind, ids, immediates)
        where = self._uniform(kind, ids, own)
        if where is not None:
            self._check_kinds(kind, ids, own)
            ids = np.where(ids == NO_NODE, NO_NODE, ids + self._base)
            return self._append(kind, num, self.new_label(), where, NO_NODE, ids, None, immediates)
        for name, values in immediates.items():
            if not isinstance(values, Sized) or len(values) != num:
                raise self._bad(name, values, _ints(num))
        for i in range(num):
            self._one(kind, ids[i : i + 1], {name: values[i : i + 1] for name, values in immediates.items()})
        return range(own, own + num)

    def returns(self, *nodes: int) -> None:
        """The states of these nodes are part of the result, in this order.

        Raises:
          GraphError: no node of this request, one twice, or one that may not be computed.
        """
        for node in nodes:
            self._check_node("returns", node, is_source=False)
            if node in self._returned_here:
                raise self._bad("returns", node, "a node that is not returned already", node=None)
            if self.piece(self._base + node).stop is not None:
                raise self._bad("returns", node, "no node of a chain that may end before it", node=None)
            if self._base + node != self.num_nodes - 1:
                self.has_only_chains = False
            self.places.append(len(self._returned_here))
            self.returned.append(self._base + node)
            self._returned_here.add(node)

    def begin(self) -> None:
        """The next request's nodes follow."""
        self._base = self.num_nodes
        self._returned_here.clear()
        self._is_open = True

    def end(self) -> None:
        """The request is whole.

        Raises:
          GraphError: it has no node, or nobody would learn anything of it.
        """
        if self.num_nodes == self._base:
            raise GraphError("graph", 0, "at least one node")
        if not self._returned_here and not self._emits():
            raise GraphError("returns", (), "one node at least, since no cell of the request emits anything")
        self.ends.append((self.num_nodes, len(self.joined), len(self.returned)))
        self._is_open = False

    def check_ends(self, num: int) -> None:
        """All that was added is `num` requests.

        Raises:
          GraphError: there are more or fewer, or nodes behind the last one.
        """
        if len(self.ends) != num or self.ends[-1][0] != self.num_nodes:
            limit = f"{num}, one for each request that it was given, and no node beside them"
            raise GraphError("unfold_many", len(self.ends), limit)

    def _check_closed(self, method: str) -> None:
        """What adds whole requests is for `unfold_many`: within one they would end it."""
        if self._is_open:
            raise GraphError(method, "called by unfold", "called by unfold_many, which adds whole requests")

    def _emits(self) -> bool:
        """Whether a cell of this request tells anything."""
        first = bisect_left(self.starts, self._base)
        return any(self.types.types[piece.kind].emits for piece in self.pieces[first:])

    def _find(self, cell: Any) -> CellType:
        try:
            return self.types.find(cell)
        except CellError as error:
            own = self.num_nodes - self._base
            raise CellError(f"nodes[{own}].{error.field}", error.value, error.limit) from error

    def _check_until(self, kind: CellType, until: Any) -> None:
        """A node that emits it ends its chain: so it is compared, as what is emitted, bit by bit."""
        if not kind.emits:
            raise self._bad("until", until, f"None: {kind.name} emits nothing")
        dtype = kind.emits[0][1]
        if np.dtype(dtype).kind not in "iu":
            raise self._bad("until", until, f"None: {kind.name} emits {dtype} first, and no ints")
        if not is_int32(until):
            raise self._bad("until", until, "an int of 32 bits")

    def _one(
        self, kind: CellType, ids: np.ndarray, immediates: dict[str, Sequence[int] | np.ndarray]
    ) -> range:
        """A node that may join subgraphs."""
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
        label = min(labels) if labels else self.new_label()
        for other in labels:
            self.joined[other] = label
        return self._append(kind, 1, label, stage, NO_NODE, np.array([sources]), None, immediates)

    def _uniform(self, kind: CellType, ids: np.ndarray, own: int) -> int | None:
        """The stage of nodes that are one subgraph of their own, seen at a glance; None if they may not be.

        They hang together as a tree does: each but the last is read by one of them, and everything else that
        they read is of other types and of one stage.
        """
        is_inner = ids >= own
        inner, outer = ids[is_inner], ids[~is_inner]
        if len(inner) != len(ids) - 1 or len(np.unique(inner)) < len(inner) or not len(outer):
            return None
        if outer.min() == NO_NODE:
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
                raise self._bad(f"inputs[{slot}]", kind.name, "of the kind that this input takes")

    def _source(self, kind: CellType, slot: int, node: int | None) -> int:
        """The id through all requests of what an input reads."""
        if node is None:
            return NO_NODE
        self._check_node(f"inputs[{slot}]", node)
        self._check_kind(kind, slot, self.piece(self._base + node), node)
        return self._base + node

    def _check_kind(self, kind: CellType, slot: int, source: Piece, node: int | None) -> None:
        found = self.types.types[source.kind]
        if source.stop is not None:
            raise self._bad(f"inputs[{slot}]", node, "no node of a chain that may end before it")
        if found.state_kind != kind.input_kinds[slot]:
            expected = dict(self.types.kinds[kind.input_kinds[slot]])
            hint = f"{found.name} leaves {dict(self.types.kinds[found.state_kind])}"
            raise self._bad(f"inputs[{slot}]", node, f"a node that leaves {expected}", hint=hint)

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
        """Without a label each node is a subgraph of its own."""
        own = self.num_nodes - self._base
        if own + num > self._max_nodes:
            raise CapacityError(
                f"nodes[{own}]", own + num, f"at most max_nodes ({self._max_nodes}) of a request"
            )
        if len(immediates) != len(kind.immediates) or immediates.keys() != {*kind.immediates}:
            raise self._bad("immediates", sorted(immediates), f"{list(kind.immediates)}, for {kind.name}")
        self._append_immediates(kind, num, immediates)
        is_apart = label is None
        if label is None:
            label = len(self.joined)
            self.joined.extend(range(label, label + num))
        self.add_piece(num, Piece(self.num_nodes, kind.index, label, is_apart, stage, after, inputs, stop))
        return range(own, own + num)

    def _append_immediates(
        self, kind: CellType, num: int, immediates: dict[str, Sequence[int] | np.ndarray]
    ) -> None:
        found = []
        for name in kind.immediates:
            values = int32s(immediates[name])
            if values is None or len(values) != num:
                raise self._bad(name, immediates[name], _ints(num))
            found.append(values)
        self.add_immediates(num, found)

    def _bad(self, field: str, value: Any, limit: str, node: int | None = 0, hint: str = "") -> GraphError:
        """Of the node that would be next, or of one some places behind it; of none if `node` is None."""
        own = self.num_nodes - self._base + (node or 0)
        return GraphError(field if node is None else f"nodes[{own}].{field}", value, limit, hint)


def _ints(num: int) -> str:
    return f"{num} ints of 32 bits" if num > 1 else "one int of 32 bits"
