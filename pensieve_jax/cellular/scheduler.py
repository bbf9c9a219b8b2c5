"""Algorithm 1 of the thesis: which type of cell a worker runs next, and which nodes.

Owns: the queues of ready nodes, and the choice of type.
Does not know: requests, completion, or time.
Called by: `loop`, `request_processor`.

The thesis leaves open what `config` decides. Nodes whose subgraph is pinned to another worker do not count as
ready for this one, or its first task could be empty; batch sizes are a type's own; equal priorities go by
order of registration. On one device the printed order of preference starves encoders below full batches,
since a decoder has always something to run: there types alternate, unless one has a full batch and another
has not.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.formation import Formation
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.parts import Parts
from pensieve_jax.cellular.ready_queue import ReadyQueue
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.tables import Tables


class LaunchScheduler(Protocol):
    """What chooses launches from what is ready: `Scheduler`, or one of its rivals in `baselines`."""

    restarts: bool
    """Whether it takes requests that lost their state and begin again; others fail."""

    def check(self, parts: Parts) -> None:
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


class Scheduler:
    """Of all workers.

    Attributes:
      queues: ready nodes of each type.
      num_running: tasks of each type that were launched and have not completed.
    """

    restarts = True

    def __init__(
        self, types: CellTypes, tables: Tables, formation: Formation, config: CellularConfig
    ) -> None:
        """Nothing is ready."""
        self._types, self._formation, self._config = types, formation, config
        self._subgraphs = tables.subgraphs
        self.queues = [
            ReadyQueue(tables.nodes, tables.subgraphs, num_workers=config.num_devices) for _ in types.types
        ]
        self.num_running = np.zeros(len(types.types), np.int64)
        tie_break = config.tie_break or ("alternate" if config.num_devices == 1 else "priority")
        self._alternates = tie_break == "alternate"
        self._num_launches = 0
        self._last_launch = np.zeros(len(types.types), np.int64)

    def schedule(self, worker: int) -> Launch | None:
        """`Schedule` of Algorithm 1: tasks for a worker with room for a launch; None if nothing is ready."""
        ready = [queue.count(worker) for queue in self.queues]
        types = self._types.types
        chosen = (
            [one for one in types if ready[one.index] >= one.max_batch]
            or [one for one in types if ready[one.index] and not self.num_running[one.index]]
            or [one for one in types if ready[one.index]]
        )
        if not chosen:
            return None
        return self._batch(self._first(chosen), worker)

    def check(self, parts: Parts) -> None:
        """Any graph runs."""

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
