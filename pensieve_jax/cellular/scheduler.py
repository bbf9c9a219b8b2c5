"""Algorithm 1 of the thesis: which type of cell a worker runs next, and which nodes.

Owns: the queues of ready nodes, and the choice of type.
Does not know: requests, completion, or time.

The thesis leaves open what `config` decides. Nodes whose subgraph is pinned to another worker do not count as
ready for this one, or its first task could be empty; batch sizes are a type's own; equal priorities go by
order of registration. On one device the printed order of preference starves encoders below full batches,
since a decoder has always something to run: there types alternate, unless one has a full batch and another
has not. Who never has one waits then for as long as others have, whatever its priority is: fullness comes
first in the thesis, or a decoder, which comes before encoders, would run in small batches. `max_skips` bounds
that.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.formation import Formation
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.parts import GraphColumns
from pensieve_jax.cellular.ready_queue import ReadyQueue
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.tables import Tables


class LaunchScheduler(Protocol):
    """What chooses launches from what is ready: `CellScheduler`, or a baseline of the lab."""

    restarts: bool
    """Whether it takes requests that lost their state and begin again; others fail."""

    def check(self, parts: GraphColumns) -> None:
        """Raise GraphError for a request that it cannot run, before that is anywhere."""

    def schedule(self, worker: int) -> Launch | None:
        """What a worker with room for a launch is to run next; None if there is nothing."""

    def completed(self, launch: Launch) -> None:
        """Its tasks run no more."""

    def release(self, kind: int, nodes: np.ndarray) -> None:
        """These nodes of a type are ready, of subgraphs that begin; those of one follow one another."""

    def remove_dropped(self, kind: int) -> None:
        """Nodes of a type were dropped that were ready."""

    def told(self, ended: list[CellRequest]) -> list[CellRequest]:
        """Of requests that have ended, now or before, those that may be told now."""


class CellScheduler:
    """Of all workers.

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
        self._skips = np.zeros(len(types.types), np.int64)  # launches of others while it was ready
        self._num_launches = 0
        self._last_launch = np.zeros(len(types.types), np.int64)

    def schedule(self, worker: int) -> Launch | None:
        """`Schedule` of Algorithm 1: tasks for a worker with room for a launch; None if nothing is ready."""
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
        # Of several the longest overdue, or two of them could leave a third one behind for ever.
        kind = max(overdue, key=lambda one: skips[one.index]) if overdue else self._first(chosen)
        if most is not None:
            self._note_skips(kind, ready)
        return self._batch(kind, worker)

    def check(self, parts: GraphColumns) -> None:
        """Accept every request: this scheduler can run any graph."""

    def completed(self, launch: Launch) -> None:
        """Its tasks run no more."""
        self.num_running[launch.kind.index] -= len(launch.tasks)

    def release(self, kind: int, nodes: np.ndarray) -> None:
        """These nodes of a type are ready, of subgraphs that begin; those of one follow one another."""
        self.queues[kind].release(nodes)

    def remove_dropped(self, kind: int) -> None:
        """Nodes of a type were dropped that were ready."""
        self.queues[kind].remove_dropped()

    def told(self, ended: list[CellRequest]) -> list[CellRequest]:
        """Of requests that have ended those that may be told now: all."""
        return ended

    def _first(self, chosen: list[CellType]) -> CellType:
        if self._alternates:
            return min(chosen, key=lambda one: (self._last_launch[one.index], -one.priority))
        return max(chosen, key=lambda one: (one.priority, -one.index))

    def _note_skips(self, kind: CellType, ready: list[int]) -> None:
        """This type is next, though others are ready for the same worker."""
        for index, queue in enumerate(self.queues):
            if index == kind.index or not len(queue):
                self._skips[index] = 0
            elif ready[index]:  # else what waits belongs to other workers, which pass it or not
                self._skips[index] += 1

    def _batch(self, kind: CellType, worker: int) -> Launch:
        """`Batch` of Algorithm 1."""
        queue, formation = self.queues[kind.index], self._formation
        most, least = self._config.max_num_tasks, self._config.min_batch
        if self._subgraphs.num_bent[kind.index]:
            num_tasks = 0
            while num_tasks < most and queue.count(worker) >= (least if num_tasks else 1):
                taken = queue.take(worker, kind.max_batch)
                queue.go_on(formation.add(kind, worker, taken))
                num_tasks += 1
        else:
            num_tasks = formation.add_chains(kind, worker, queue, most=most, least=least)
        self._num_launches += 1
        self._last_launch[kind.index] = self._num_launches
        self.num_running[kind.index] += num_tasks
        return formation.launch(kind, worker)
