"""The graph of a request: its cells and what each reads. A user's function writes it, here.

Owns: the methods that users have, and what is told of their arguments.
Does not know: when anything runs, or other requests' graphs, though it holds those of one `submit_many`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular.cells import CellType
from pensieve_jax.cellular.errors import GraphError, UnfoldError
from pensieve_jax.cellular.integers import INT32, is_int32, is_sized
from pensieve_jax.cellular.many import add_sentences, add_trees
from pensieve_jax.cellular.node_writer import NodeWriter, ints
from pensieve_jax.cellular.pieces import NEW_LABEL, NO_NODE, Piece


class Graph(NodeWriter):
    """Graphs of requests, one after the other; a method's ids are those of the request at hand, from 0."""

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
            if not kind.immediates or kind.immediates[0] in immediates:
                why = "takes no immediates" if not kind.immediates else f"has {kind.immediates[0]} already"
                raise self._bad("words", words, f"absent: {kind.name} {why}")
            immediates = {kind.immediates[0]: words, **immediates}
        if num is None:
            num = self._length(kind, immediates)
        source = self._source(kind, 0, after)
        if until is not None:
            self._check_until(kind, until)
        if not is_int32(num) or num < 1:
            raise self._bad("num", num, "an int of at least 1")
        num = int(num)
        if num > 1 and not kind.is_chained:
            raise self._bad("num", num, f"1: {kind.name} does not read what it leaves")
        stage, label = 0, NEW_LABEL
        if source != NO_NODE:
            piece = self.piece(source)
            stage = piece.stage
            if piece.kind == kind.index:
                label = self.label(source)
                self.has_only_chains = False
            else:
                stage += 1
        return self._append(kind, num, label, stage, source, None, until, immediates)

    def _length(self, kind: CellType, immediates: Mapping[str, Any]) -> int:
        """Of a chain whose words say it."""
        if not immediates:
            name, limit = "num", "a number of nodes, where there are no immediates"
            if kind.immediates:
                name, limit = kind.immediates[0], "a sequence of ints, where num is not given"
            raise self._bad(name, None, limit)
        name, values = next(iter(immediates.items()))
        if not is_sized(values):
            raise self._bad(name, values, "a sequence of ints, where num is not given")
        if not len(values):
            raise self._bad(name, values, "one int of 32 bits at least")
        return len(values)

    def _sentence(self, kind: CellType, words: Any) -> range | None:
        """A chain of words from the initial state, as most requests are; None if it is not that."""
        if type(words) is not np.ndarray or words.dtype != INT32 or words.ndim != 1:
            return None
        if not kind.is_chained or len(kind.immediates) != 1:
            return None
        num, own = len(words), self.num_nodes - self._base
        if not num or own + num > self._max_nodes or not self._is_open:
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
        try:
            ids = np.asarray(inputs)
        except ValueError:  # rows of several lengths
            ids = np.empty(0)
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
            return self._append(kind, num, NEW_LABEL, where, NO_NODE, ids, None, immediates)
        for name, values in immediates.items():
            if not is_sized(values) or len(values) != num:
                raise self._bad(name, values, ints(num))
        for i in range(num):
            self._one(kind, ids[i : i + 1], {name: values[i : i + 1] for name, values in immediates.items()})
        return range(own, own + num)

    def returns(self, *nodes: int) -> None:
        """The states of these nodes are part of the result, in this order.

        Raises:
          GraphError: no node of this request, one twice, or one that may not be computed.
        """
        self._check_open()
        for node in nodes:
            self._check_node("returns", node, is_source=False)
            node = int(node)  # whose own type may be too small for what is added to it
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
        """The next request's nodes follow; for `unfold_many`, where `unfold` has a request already.

        Raises:
          UnfoldError: the one before was not ended.
        """
        self._check_closed("begin")
        self._base = self.num_nodes
        self._returned_here.clear()
        self._is_open = True

    def end(self) -> None:
        """The request is whole.

        Raises:
          GraphError: it has no node, or nobody would learn anything of it.
          UnfoldError: it was ended before.
        """
        self._check_open()
        if self.num_nodes == self._base:
            raise GraphError("graph", 0, "at least one node")
        if not self._returned_here and not self._emits():
            raise GraphError("returns", (), "one node at least, since no cell of the request emits anything")
        self.ends.append((self.num_nodes, len(self.joined), len(self.returned)))
        self._is_open = False

    def check_ends(self, num: int) -> None:
        """All that was added is `num` requests.

        Raises:
          UnfoldError: there are more or fewer, or the last one was not ended.
        """
        if len(self.ends) != num or self._is_open:
            limit = f"{num}, one for each request that it was given, all of them ended"
            raise UnfoldError("unfold_many", len(self.ends), limit)

    def _check_closed(self, method: str) -> None:
        """What adds whole requests is for `unfold_many`: within one they would end it."""
        if self._is_open:
            raise UnfoldError(method, "called by unfold", "called by unfold_many, which adds whole requests")
