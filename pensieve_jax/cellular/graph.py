"""Graph of a request, which the user's `unfold` function builds: its cells and their inputs.

Owns: the methods for users, and the errors about their arguments.
Does not know: when a node runs, or graphs of other `submit_many` calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular.cells import CellType
from pensieve_jax.cellular.errors import GraphError, UnfoldError
from pensieve_jax.cellular.graph_batch import NEW_LABEL, NO_NODE, Piece
from pensieve_jax.cellular.integers import INT32, is_int32, is_sized
from pensieve_jax.cellular.many import add_sentences, add_trees
from pensieve_jax.cellular.node_writer import NodeWriter, ints


class Graph(NodeWriter):
    """Graphs of the requests of one `submit_many`. Node ids count from 0 within the current request."""

    def add(self, cell: Any, inputs: Sequence[int | None] = (), **immediates: int) -> int:
        """Add one node; return its id.

        Args:
          cell: a `Cell`, its module, or its name.
          inputs: ids of nodes, one for each input of the cell; None means the initial state, zeros.
          **immediates: the cell's immediates.

        Raises:
          GraphError: an input is not an earlier node or is of another kind, or the immediates are not the
            cell's or not 32-bit integers.
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
        """Add a chain of nodes; each reads the one before it. Return their ids.

        Args:
          cell: a cell with one input.
          words: values of the cell's first immediate, one per node.
          num: number of nodes; required for a cell without immediates.
          after: node that the first one reads; None means the initial state.
          until: a value of the first field that the cell emits. The chain ends at the node that emits it;
            `num` is then the most nodes it may have, and no other node may read them.
          **immediates: by name, one value per node.

        Raises:
          GraphError: see `add`.
        """
        kind = self._find(cell)
        if after is None and until is None and num is None and not immediates:
            found = self._sentence(kind, words)
            if found is not None:
                return found
        if len(kind.input_kinds) != 1:
            raise self._bad("inputs", len(kind.input_kinds), f"one input; {kind.name} cannot form a chain")
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
            raise self._bad("num", num, f"1: {kind.name} does not read its own state")
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
        """Return the length of a chain, from its immediates."""
        if not immediates:
            name, limit = "num", "a number of nodes, since there are no immediates"
            if kind.immediates:
                name, limit = kind.immediates[0], "a sequence of ints, since num is not given"
            raise self._bad(name, None, limit)
        name, values = next(iter(immediates.items()))
        if not is_sized(values):
            raise self._bad(name, values, "a sequence of ints, since num is not given")
        if not len(values):
            raise self._bad(name, values, "at least one int of 32 bits")
        return len(values)

    def _sentence(self, kind: CellType, words: Any) -> range | None:
        """Add a chain of words from the initial state, the most frequent request; None if it is not one."""
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
        """Add a whole request for each sentence: a chain of all its words that returns its last state.

        Args:
          cell: a cell with one input and one immediate.
          words: i32[n] of each sentence.

        Raises:
          GraphError: an argument is invalid (unfolding one by one gives a precise error), or `unfold` called
            this method.
        """
        self._check_closed("sentences")
        add_sentences(self, self._find(cell), words, self._max_nodes)

    def trees(
        self, leaf: Any, inner: Any, words: Sequence[np.ndarray], children: Sequence[np.ndarray]
    ) -> None:
        """Add a whole request for each tree, which returns the state of its root.

        Args:
          leaf: a cell without inputs and with one immediate.
          inner: a cell without immediates whose inputs, state, and `leaf`'s state are of one kind.
          words: i32[n] of each tree, one per leaf; the leaves are nodes 0 to n - 1.
          children: int[m, fan_in] of each tree: earlier nodes. Inner nodes count from n, the root last.

        Raises:
          GraphError: an argument is invalid (unfolding one by one gives a precise error), or `unfold` called
            this method.
        """
        self._check_closed("trees")
        add_trees(self, self._find(leaf), self._find(inner), words, children, self._max_nodes)

    def nodes(self, cell: Any, inputs: np.ndarray, **immediates: Sequence[int] | np.ndarray) -> range:
        """Add nodes with explicit inputs; return their ids.

        Args:
          cell: a cell with any number of inputs.
          inputs: int[n, fan_in], ids of earlier nodes, earlier ones of this call included; `NO_NODE` means
            the initial state.
          **immediates: by name, one value per node.

        Raises:
          GraphError: see `add`. Only earlier nodes may be read, so cycles are impossible.
        """
        kind = self._find(cell)
        try:
            ids = np.asarray(inputs)
        except ValueError:  # rows of unequal lengths
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
        """Add the states of these nodes to the result, in this order.

        Raises:
          GraphError: not a node of this request, returned twice, or part of a chain that may end before it.
        """
        self._check_open()
        for node in nodes:
            self._check_node("returns", node, is_source=False)
            node = int(node)  # a narrow numpy type could overflow in the sum below
            if node in self._returned_here:
                raise self._bad("returns", node, "a node that is not returned already", node=None)
            if self.piece(self._base + node).stop is not None:
                raise self._bad("returns", node, "a node outside of chains that may end early", node=None)
            if self._base + node != self.num_nodes - 1:
                self.has_only_chains = False
            self.places.append(len(self._returned_here))
            self.returned.append(self._base + node)
            self._returned_here.add(node)

    def begin(self) -> None:
        """Begin the next request. Only `unfold_many` calls this; for `unfold` the request has begun.

        Raises:
          UnfoldError: the previous request was not ended.
        """
        self._check_closed("begin")
        self._base = self.num_nodes
        self._returned_here.clear()
        self._is_open = True

    def end(self) -> None:
        """End the current request.

        Raises:
          GraphError: it has no node, or neither returns nor emits anything.
          UnfoldError: it was ended before.
        """
        self._check_open()
        if self.num_nodes == self._base:
            raise GraphError("graph", 0, "at least one node")
        if not self._returned_here and not self._emits():
            raise GraphError("returns", (), "at least one node, since no cell of the request emits anything")
        self.ends.append((self.num_nodes, len(self.joined), len(self.returned)))
        self._is_open = False

    def check_ends(self, num: int) -> None:
        """Check that exactly `num` requests were added.

        Raises:
          UnfoldError: there are more or fewer, or the last one was not ended.
        """
        if len(self.ends) != num or self._is_open:
            limit = f"{num}, one for each given request, all of them ended"
            raise UnfoldError("unfold_many", len(self.ends), limit)

    def _check_closed(self, method: str) -> None:
        """Raise UnfoldError within a request: methods that add whole requests are for `unfold_many`."""
        if self._is_open:
            raise UnfoldError(method, "called by unfold", "called by unfold_many, which adds whole requests")
