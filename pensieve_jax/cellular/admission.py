"""Admission of requests: from their graphs into the tables, the promise of rows, and removal at the end.

Owns: request ids in the tables, the queue of waiting requests, promised rows, and the limits of requests.
Does not know: what runs, or the progress of a request between its promise and its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.errors import CapacityError, UnfoldError
from pensieve_jax.cellular.graph import Graph
from pensieve_jax.cellular.graph_columns import GraphColumns
from pensieve_jax.cellular.partition import partition
from pensieve_jax.cellular.ready_queue import IntFifo
from pensieve_jax.cellular.rows import RowBudget
from pensieve_jax.cellular.tables import NOWHERE, Tables
from pensieve_jax.core.errors import InvalidFieldError

type Unfold = Callable[[Any, Graph], None]
type UnfoldMany = Callable[[Sequence[Any], Graph], None]


_AT_A_TIME = 512
_SHORT = 128  # longest sentence, in words, whose columns are cached
_NO_IDS = np.empty(0, np.int64)


class Unfolded(NamedTuple):
    """Checked requests that are not in the tables yet.

    Attributes:
      graph: the graphs of all requests.
      parts: columns derived from the graphs.
      num: number of requests.
    """

    graph: Graph
    parts: GraphColumns
    num: int


class Admission:
    """Admission of one engine.

    Attributes:
      waiting: ids of requests without promised rows, in order of arrival.
      budget: promised rows.
    """

    def __init__(self, types: CellTypes, tables: Tables, config: CellularConfig, num_rows: int) -> None:
        """Start without requests. Each device has `num_rows` rows of each kind of state."""
        self._types, self._tables, self._config = types, tables, config
        self.waiting = IntFifo()
        self.budget = RowBudget(num_rows, len(types.kinds))
        self._sentences: dict[tuple[int, int], GraphColumns] = {}

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Ids of all requests in the tables: waiting, running, or finished with nodes still in flight."""
        return tuple(np.flatnonzero(self._tables.requests.arrival != NOWHERE).tolist())

    def read(
        self,
        requests: Sequence[Any],
        unfold: Unfold,
        unfold_many: UnfoldMany | None,
        check: Callable[[GraphColumns], None],
        *,
        is_limited: bool,
    ) -> Unfolded:
        """Unfold and check requests without changing any state.

        `check` raises GraphError for graphs that the scheduler cannot run. Unless `is_limited`, any number of
        requests may wait.

        Raises:
          GraphError: a graph cannot be computed.
          CapacityError: a graph is too large or too deep, needs more rows than exist, or too many requests
            wait.
        """
        graph = self._unfolded(requests, unfold, unfold_many)
        parts = self._parts(graph)
        self._check_room(parts, len(requests), is_limited)
        check(parts)
        return Unfolded(graph, parts, len(requests))

    def enter(self, unfolded: Unfolded) -> tuple[range, list[int]]:
        """Queue requests; return their ids, and the number of states that each returns."""
        graph, parts, num = unfolded
        tables, num_nodes, num_subs = self._tables, len(parts.kind), len(parts.sub_kind)
        node = tables.nodes.allocate(num_nodes)
        sub = tables.subgraphs.allocate(num_subs)
        first = tables.requests.allocate(num)
        tables.nodes.fill(node, parts, graph.immediates, sub, first)
        tables.subgraphs.fill(sub, parts, node, first)
        tables.requests.fill(first, parts, node, sub)
        ids = range(first, first + num)
        tables.requests.arrival[first : first + num] = tables.arrivals.enter(
            node=node, num_nodes=num_nodes, sub=sub, num_subs=num_subs, first=first, num=num, num_left=num
        )
        self.waiting.push(np.array(ids))
        return ids, parts.num_returned.tolist()

    def admit(self) -> np.ndarray:
        """Promise rows to waiting requests, in order, while they fit; return the ids of the admitted ones."""
        admitted = [_NO_IDS]
        while len(self.waiting):
            some = self.waiting.values[:_AT_A_TIME]  # not all at once, since the queue may be long
            num = self.budget.admit(self._tables.requests.rows[:, some].T)
            admitted.append(self.waiting.pop(num))
            if num < len(some):
                break
        return admitted[-1] if len(admitted) <= 2 else np.concatenate(admitted)

    def withdraw(self, request: int) -> bool:
        """Remove a waiting request; return False if it was not waiting."""
        waiting = self.waiting.values
        if not (waiting == request).any():
            return False
        self.waiting.keep(waiting != request)
        self._tables.requests.rows[:, request] = 0  # no rows were promised
        return True

    def leave(self, requests: np.ndarray) -> None:
        """Release the promised rows of finished requests without nodes in flight.

        Ids are released when all requests of the same `submit_many` have left.
        """
        tables = self._tables
        self.budget.end(tables.requests.rows[:, requests].T)
        arrivals = tables.requests.arrival[requests]
        tables.requests.arrival[requests] = NOWHERE
        np.subtract.at(tables.arrivals.num_left, arrivals, 1)
        over = arrivals[tables.arrivals.num_left[arrivals] == 0]
        for arrival in dict.fromkeys(over.tolist()):
            room = tables.arrivals.leave(arrival)
            tables.nodes.clear(room["node"], room["num_nodes"])
            tables.subgraphs.clear(room["sub"], room["num_subs"])
            tables.requests.free(room["first"], room["num"])

    def _unfolded(self, requests: Sequence[Any], unfold: Unfold, unfold_many: UnfoldMany | None) -> Graph:
        graph = Graph(self._types, max_nodes=self._config.max_nodes)
        if unfold_many is not None:
            try:
                unfold_many(requests, graph)
            except UnfoldError:
                raise
            except InvalidFieldError:  # unfold one by one below, so that the error names the request
                graph = Graph(self._types, max_nodes=self._config.max_nodes)
            else:
                graph.check_ends(len(requests))
                return graph
        for place, request in enumerate(requests):
            graph.begin()
            try:
                unfold(request, graph)
                graph.end()
            except InvalidFieldError as error:
                if len(requests) == 1:
                    raise
                name = f"requests[{place}].{error.field}"
                raise type(error)(name, error.value, error.limit, error.hint) from error
        return graph

    def _parts(self, graph: Graph) -> GraphColumns:
        """Derive the columns of graphs. Those of a single short sentence are cached by its length."""
        key = graph.only_sentence
        known = self._sentences.get(key) if key is not None else None
        if known is None:
            known = partition(graph, max_depth=self._config.max_depth)
            if key is not None and key[1] <= _SHORT:
                self._sentences[key] = known
        return known

    def _check_room(self, parts: GraphColumns, num: int, is_limited: bool) -> None:
        over = np.argwhere(parts.rows > self.budget.num_rows)
        if len(over):
            place, kind = (int(i) for i in over[0])
            fields = ", ".join(name for name, _ in self._types.kinds[kind])
            raise CapacityError(
                f"requests[{place}].rows",
                int(parts.rows[place, kind]),
                f"at most num_rows ({self.budget.num_rows}), of the state ({fields})",
            )
        most = self._config.max_num_waiting
        if most is not None and is_limited:
            num_waiting = len(self.waiting) or -self.budget.num_fitting(parts.rows)
            if num_waiting + num > most:
                raise CapacityError(
                    "requests", num_waiting + num, f"at most max_num_waiting ({most}) that wait for rows"
                )
