"""Requests from their graphs to the tables, the promise of rows that they wait for, and out again.

Owns: ids of requests in the tables, who waits, what is promised, and the limits that refuse a request.
Does not know: what runs, or what becomes of a request between its promise and its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.errors import CapacityError, UnfoldError
from pensieve_jax.cellular.graph import Graph
from pensieve_jax.cellular.partition import partition
from pensieve_jax.cellular.parts import GraphColumns
from pensieve_jax.cellular.ready_queue import IntFifo
from pensieve_jax.cellular.rows import RowBudget
from pensieve_jax.cellular.tables import NOWHERE, Tables
from pensieve_jax.core.errors import InvalidFieldError

type Unfold = Callable[[Any, Graph], None]
type UnfoldMany = Callable[[Sequence[Any], Graph], None]


_AT_A_TIME = 512
_SHORT = 128  # words of which what is known of a sentence is kept
_NOBODY = np.empty(0, np.int64)


class Unfolded(NamedTuple):
    """Requests that may come in.

    Attributes:
      graph: of all of them.
      parts: what follows from it.
      num: how many.
    """

    graph: Graph
    parts: GraphColumns
    num: int


class Admission:
    """Of one engine.

    Attributes:
      waiting: ids of requests to which nothing was promised yet, in order.
      budget: rows that are promised.
    """

    def __init__(self, types: CellTypes, tables: Tables, config: CellularConfig, num_rows: int) -> None:
        """Nobody has come; `num_rows` of each kind are on each device."""
        self._types, self._tables, self._config = types, tables, config
        self.waiting = IntFifo()
        self.budget = RowBudget(num_rows, len(types.kinds))
        self._sentences: dict[tuple[int, int], GraphColumns] = {}

    @property
    def request_ids(self) -> tuple[int, ...]:
        """All that are in the tables: those that wait, run, or are over and have nodes in flight."""
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
        """Unfold requests; nothing is changed.

        `check` raises GraphError for what the scheduler cannot run. Unless it `is_limited`, any number may
        wait.

        Raises:
          GraphError: a graph cannot be computed.
          CapacityError: a graph is too large or too deep, its rows are more than there are, or too many wait.
        """
        graph = self._unfolded(requests, unfold, unfold_many)
        parts = self._parts(graph)
        self._check_room(parts, len(requests), is_limited)
        check(parts)
        return Unfolded(graph, parts, len(requests))

    def enter(self, unfolded: Unfolded) -> tuple[range, list[int]]:
        """Have requests wait; returns their ids, and how many states each returns."""
        graph, parts, num = unfolded
        tables, num_nodes, num_subs = self._tables, len(parts.kind), len(parts.sub_kind)
        node = tables.nodes.take(num_nodes)
        sub = tables.subgraphs.take(num_subs)
        first = tables.requests.take(num)
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
        """Promise rows to those that wait, in order, while there are enough; returns whom."""
        admitted = [_NOBODY]
        while len(self.waiting):
            some = self.waiting.values[:_AT_A_TIME]  # of a line that may be long
            num = self.budget.admit(self._tables.requests.rows[:, some].T)
            admitted.append(self.waiting.pop(num))
            if num < len(some):
                break
        return admitted[-1] if len(admitted) <= 2 else np.concatenate(admitted)

    def withdraw(self, request: int) -> bool:
        """It waits no more, and needs no rows; False if it did not wait."""
        waiting = self.waiting.values
        if not (waiting == request).any():
            return False
        self.waiting.keep(waiting != request)
        self._tables.requests.rows[:, request] = 0  # nothing was promised
        return True

    def leave(self, requests: np.ndarray) -> None:
        """What these had is given back, their promises and in time their ids.

        They are over, and none of their nodes is in flight.
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
            tables.requests.give(room["first"], room["num"])

    def _unfolded(self, requests: Sequence[Any], unfold: Unfold, unfold_many: UnfoldMany | None) -> Graph:
        graph = Graph(self._types, max_nodes=self._config.max_nodes)
        if unfold_many is not None:
            try:
                unfold_many(requests, graph)
            except UnfoldError:
                raise
            except InvalidFieldError:  # one by one it is told of which request
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
        """What follows from graphs; of a short sentence alone it is known from the last one of its length."""
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
