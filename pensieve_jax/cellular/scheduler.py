"""Scheduler: Algorithm 1 of the thesis, which chooses the type of cell and the nodes that a worker runs next.

Owns: the queues of ready nodes, and the choice of type.
Does not know: requests, completion, or time.

`config` sets what the thesis leaves open. Three details: nodes of a subgraph that is pinned to another worker
do not count as ready for this one, since its first task could be empty. Each type has its own batch sizes.
Equal priorities are ordered by registration.

On one device the order of the thesis starves encoders without full batches, since a decoder always has ready
nodes. So there types alternate, unless only one of them has a full batch. A type that never has a full batch
waits while other types have one, whatever its priority. In the thesis full batches come first, since
otherwise decoders, which precede encoders, would run in small batches. `max_skips` bounds this wait.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.formation import Formation
from pensieve_jax.cellular.graph_columns import GraphColumns
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.ready_queue import ReadyQueue
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.tables import Tables


class LaunchScheduler(Protocol):
    """Scheduler of launches: `CellScheduler`, or a baseline of the lab."""

    restarts: bool
    """Whether requests that lost their state can begin again. If not, they fail."""

    def check(self, parts: GraphColumns) -> None:
        """Raise GraphError for a request that this scheduler cannot run, before it is queued."""

    def schedule(self, worker: int) -> Launch | None:
        """Return the next launch of a worker that has room for one; None if nothing is ready."""

    def completed(self, launch: Launch) -> None:
        """Process a launch that has finished."""

    def release(self, kind: int, nodes: np.ndarray) -> None:
        """Add ready nodes of newly released subgraphs. Nodes of one subgraph must be consecutive."""

    def remove_dropped(self, kind: int) -> None:
        """Remove ready nodes of a type that were dropped."""

    def reportable(self, ended: list[CellRequest]) -> list[CellRequest]:
        """Return the finished requests that may be reported now, out of `ended` and earlier ones."""


class CellScheduler:
    """Scheduler of all workers.

    Attributes:
      queues: ready nodes of each type.
      num_running: tasks of each type that were launched and have not completed.
    """

    restarts = True

    def __init__(
        self, types: CellTypes, tables: Tables, formation: Formation, config: CellularConfig
    ) -> None:
        self._types, self._formation, self._config = types, formation, config
        self._subgraphs = tables.subgraphs
        self.queues = [
            ReadyQueue(tables.nodes, tables.subgraphs, num_workers=config.num_devices) for _ in types.types
        ]
        self.num_running = np.zeros(len(types.types), np.int64)
        tie_break = config.tie_break or ("alternate" if config.num_devices == 1 else "priority")
        self._alternates = tie_break == "alternate"
        self._skips = np.zeros(len(types.types), np.int64)  # launches of other types while it was ready
        self._num_launches = 0
        self._last_launch = np.zeros(len(types.types), np.int64)

    def schedule(self, worker: int) -> Launch | None:
        """Run `Schedule` of Algorithm 1: return the next launch of a worker, or None if nothing is ready."""
        ready = [queue.count(worker) for queue in self.queues]
        types = self._types.types
        most, skips = self._config.max_skips, self._skips
        overdue = [one for one in types if most is not None and ready[one.index] and skips[one.index] >= most]
        chosen = (
            [one for one in types if ready[one.index] >= one.max_batch]
            or [one for one in types if ready[one.index] and not self.num_running[one.index]]
            or [one for one in types if ready[one.index]]
        )
        if not chosen:
            return None
        # Choose the longest overdue type, since two alternating ones could starve a third.
        kind = max(overdue, key=lambda one: skips[one.index]) if overdue else self._first(chosen)
        if most is not None:
            self._note_skips(kind, ready)
        return self._batch(kind, worker)

    def check(self, parts: GraphColumns) -> None:
        """Accept every request: this scheduler can run any graph."""

    def completed(self, launch: Launch) -> None:
        """Process a launch that has finished."""
        self.num_running[launch.kind.index] -= len(launch.tasks)

    def release(self, kind: int, nodes: np.ndarray) -> None:
        """Add ready nodes of newly released subgraphs. Nodes of one subgraph must be consecutive."""
        self.queues[kind].release(nodes)

    def remove_dropped(self, kind: int) -> None:
        """Remove ready nodes of a type that were dropped."""
        self.queues[kind].remove_dropped()

    def reportable(self, ended: list[CellRequest]) -> list[CellRequest]:
        """Return all finished requests: this scheduler holds none back."""
        return ended

    def _first(self, chosen: list[CellType]) -> CellType:
        if self._alternates:
            return min(chosen, key=lambda one: (self._last_launch[one.index], -one.priority))
        return max(chosen, key=lambda one: (one.priority, -one.index))

    def _note_skips(self, kind: CellType, ready: list[int]) -> None:
        """Count a skip for every other type that is ready for the worker, and reset the chosen type."""
        for index, queue in enumerate(self.queues):
            if index == kind.index or not len(queue):
                self._skips[index] = 0
            elif ready[index]:  # nodes that are ready only for other workers are not skipped by this one
                self._skips[index] += 1

    def _batch(self, kind: CellType, worker: int) -> Launch:
        """Run `Batch` of Algorithm 1: form the tasks of a launch."""
        queue, formation = self.queues[kind.index], self._formation
        most, least = self._config.max_num_tasks, self._config.min_batch
        if self._subgraphs.num_irregular[kind.index]:
            num_tasks = 0
            while num_tasks < most and queue.count(worker) >= (least if num_tasks else 1):
                taken = queue.take(worker, kind.max_batch)
                queue.go_on(formation.add(kind, worker, taken))
                num_tasks += 1
        else:
            num_tasks = formation.add_chains(kind, worker, queue, max_tasks=most, min_nodes=least)
        self._num_launches += 1
        self._last_launch[kind.index] = self._num_launches
        self.num_running[kind.index] += num_tasks
        return formation.launch(kind, worker)
