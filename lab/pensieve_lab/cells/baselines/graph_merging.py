"""Graph merging: find the cells of several requests that can run together before any of them runs.

Owns: how the graphs of a batch are merged.
Does not know: how tasks run.
Called by `cells.systems`.

"depth" follows TensorFlow Fold: cells of one type at the same height above the leaves form one operator.
"agenda" follows DyNet: among the types with ready cells, it runs all ready cells of the type with the lowest
average height. Both merge whole cells here, which spares DyNet a launch for each operator of a cell. A batch
is at most 64 requests, the best value for both (thesis, section 2.7.5). Merging uses arrays, like every
system that it is compared with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.formation import Formation
from pensieve_jax.cellular.tables import INITIAL, Nodes, Tables
from pensieve_jax.core.errors import ConfigError
from pensieve_lab.cells.baselines.graph_batching import GraphBatching, Task, WaitingRequest

DEFAULT_MAX_GRAPHS = 64
_TAKEN = -1
type Group = tuple[int, np.ndarray]
"""A cell type, and the positions of the nodes that run together."""


class GraphMerging(GraphBatching):
    """Scheduler that merges arbitrary graphs."""

    def __init__(
        self,
        types: CellTypes,
        tables: Tables,
        formation: Formation,
        config: CellularConfig,
        *,
        order: str = "agenda",
        max_graphs: int = DEFAULT_MAX_GRAPHS,
    ) -> None:
        """Make a scheduler; an engine takes `functools.partial(GraphMerging, order=...)`.

        Args:
          order: "depth" or "agenda".
          max_graphs: largest number of requests in a batch.
        """
        super().__init__(types, tables, formation, config)
        if order not in ("depth", "agenda"):
            raise ConfigError("order", order, "'depth' or 'agenda'")
        self._groups = {"depth": MergedGraphs.by_depth, "agenda": MergedGraphs.by_agenda}[order]
        self._most = max_graphs
        self._line: deque[WaitingRequest] = deque()

    def _arrived(self, one: WaitingRequest) -> None:
        self._line.append(one)

    def _choose(self) -> list[WaitingRequest]:
        return [self._line.popleft() for _ in range(min(self._most, len(self._line)))]

    def _plan(self, requests: Sequence[int]) -> list[Task]:
        nodes = np.concatenate(
            [np.arange(self.requests.start[one], self.requests.end[one]) for one in requests]
        )
        merged = MergedGraphs(self.nodes, nodes)
        tasks = []
        for kind, places in self._groups(merged):
            members = nodes[places]
            most = self.types.types[kind].max_batch
            for start in range(0, len(members), most):
                part = members[start : start + most]
                tasks.append(Task(self.types.types[kind], part, len(part)))
        return tasks


class MergedGraphs:
    """The graphs of a batch as one set of arrays, indexed by node position.

    Attributes:
      kinds: i64[n], cell types.
      heights: i64[n], one more than the greatest height of a node's inputs; 0 without inputs.
    """

    def __init__(self, table: Nodes, nodes: np.ndarray) -> None:
        """Merge nodes.

        Args:
          table: the node table.
          nodes: their ids, which must include all nodes of each request.
        """
        num = len(nodes)
        self.kinds = table.kind[nodes].astype(np.int64)
        inputs = table.inputs[:, nodes]
        is_read = inputs != INITIAL
        table.mark[nodes] = np.arange(num)
        readers = np.broadcast_to(np.arange(num), inputs.shape)[is_read]
        sources = table.mark[inputs[is_read]]
        order = np.argsort(sources, kind="stable")
        self._readers = readers[order]
        self._num_readers = np.bincount(sources, minlength=num)
        self._ends = np.cumsum(self._num_readers)
        self._num_inputs = np.bincount(readers, minlength=num)
        self.heights = np.zeros(num, np.int64)
        for height, places in enumerate(self._levels()):
            self.heights[places] = height

    def by_depth(self) -> list[Group]:
        """Return the groups of equal type and height, lowest first."""
        order = np.lexsort((self.kinds, self.heights))
        kinds, heights = self.kinds[order], self.heights[order]
        starts = np.flatnonzero((np.diff(kinds, prepend=-1) != 0) | (np.diff(heights, prepend=-1) != 0))
        return list(zip(kinds[starts].tolist(), np.split(order, starts[1:]), strict=True))

    def by_agenda(self) -> list[Group]:
        """Return the groups that result from always running the ready type with the lowest average height."""
        mean_height = np.full(int(self.kinds.max()) + 1, np.inf)
        for kind in np.unique(self.kinds).tolist():
            mean_height[kind] = self.heights[self.kinds == kind].mean()
        order = np.argsort(np.argsort(mean_height, kind="stable"))[self.kinds]
        missing, groups = self._num_inputs.copy(), []
        while len(ready := np.flatnonzero(missing == 0)):
            ranks = order[ready]
            places = ready[ranks == ranks.min()]
            groups.append((int(self.kinds[places[0]]), places))
            self._take(places, missing)
        return groups

    def _levels(self) -> Iterator[np.ndarray]:
        """Yield the node positions of each height."""
        missing = self._num_inputs.copy()
        while len(places := np.flatnonzero(missing == 0)):
            yield places
            self._take(places, missing)

    def _take(self, places: np.ndarray, missing: np.ndarray) -> None:
        """Mark nodes as run, and update the number of missing inputs of their readers."""
        missing[places] = _TAKEN
        ends, nums = self._ends[places], self._num_readers[places]
        readers = self._readers[np.arange(nums.sum()) + np.repeat(ends - np.cumsum(nums), nums)]
        np.subtract.at(missing, readers, 1)
