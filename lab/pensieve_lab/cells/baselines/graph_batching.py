"""Graph batching: whole requests form a batch, which runs to its end before the next one begins.

Owns: the batches in flight, and when their requests are reported as finished.
Does not know: which requests form a batch, or in which tasks it runs.
Subclassed by the other baselines.

Thesis, section 2.2.3: such systems synchronize requests that need not be synchronized. Here they run the same
cells in the same programs and batch sizes, and begin a batch as soon as a device is free, without a timeout
(section 2.7.1). A batch is chosen and planned once every task of the previous one is launched, while that one
still runs, because a device runs launches in order. At most one batch is ahead, so that it is chosen as late
as possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.formation import Formation
from pensieve_jax.cellular.graph_columns import GraphColumns
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.tables import WAITING, Tables

_MAX_BATCHES = 2  # per worker: the running batch and the next


class WaitingRequest(NamedTuple):
    """A waiting request.

    Attributes:
      serial: number of the request in order of arrival.
      request: its id.
    """

    serial: int
    request: int


class Task(NamedTuple):
    """A step of a batch.

    Attributes:
      kind: the cell type.
      nodes: nodes that compute something.
      room: nodes of the task, including those that compute nothing any more.
    """

    kind: CellType
    nodes: np.ndarray
    room: int


@dataclass(slots=True)
class Batch:
    """Requests that run together.

    Attributes:
      requests: their ids. After a cancellation, another request may get an id before the batch ends.
      serials: their numbers.
      tasks: those that are not launched yet.
      num_in_flight: launches of the batch in flight.
    """

    requests: np.ndarray
    serials: np.ndarray
    tasks: deque[Task]
    num_in_flight: int = 0


class GraphBatching:
    """Common part of all graph batching. Subclasses implement `_arrived`, `_choose` and `_plan`."""

    def __init__(
        self, types: CellTypes, tables: Tables, formation: Formation, config: CellularConfig
    ) -> None:
        """Start with no waiting requests."""
        self.types, self.nodes = types, tables.nodes
        self.subgraphs, self.requests = tables.subgraphs, tables.requests
        self._formation, self._config = formation, config
        self._batches: list[deque[Batch]] = [deque() for _ in range(config.num_devices)]
        self._of_launch: dict[Launch, Batch] = {}
        self._known: set[int] = set()
        self._running: set[int] = set()
        self._to_tell: list[CellRequest] = []

    restarts = False

    def check(self, parts: GraphColumns) -> None:
        """Accept every graph, as all of them can run."""

    def schedule(self, worker: int) -> Launch | None:
        """Return the next launch of the worker's last batch, or the first launch of a new batch."""
        batches = self._batches[worker]
        if not batches or not batches[-1].tasks:
            batch = self.next_batch() if len(batches) < _MAX_BATCHES else None
            if batch is None:
                return None
            batches.append(batch)
        batch = batches[-1]
        kind, room, num_tasks = batch.tasks[0].kind, 0, 0
        while batch.tasks and batch.tasks[0].kind is kind and num_tasks < self._config.max_num_tasks:
            task = batch.tasks.popleft()
            self._formation.add(kind, worker, self._wanted(batch, task.nodes))
            room, num_tasks = max(room, task.room), num_tasks + 1
        launch = self._formation.launch(kind, worker, least=room)
        batch.num_in_flight += 1
        self._of_launch[launch] = batch
        return launch

    def next_batch(self) -> Batch | None:
        """Return the next batch with its tasks, or None if no request waits."""
        while chosen := self._choose():
            self._known.difference_update(one.serial for one in chosen)
            wanted = [one for one in chosen if self._is_wanted(one)]
            if wanted:
                serials, requests = map(list, zip(*wanted, strict=True))
                self._running.update(serials)
                return Batch(np.array(requests), np.array(serials), deque(self._plan(requests)))
        return None

    def completed(self, launch: Launch) -> None:
        """Count a launch as finished; retire its batch after the last one."""
        batch = self._of_launch.pop(launch)
        batch.num_in_flight -= 1
        if not batch.tasks and not batch.num_in_flight:
            self._batches[launch.worker].popleft()
            self._running.difference_update(batch.serials.tolist())

    def release(self, kind: int, nodes: np.ndarray) -> None:
        """Register requests that may begin. Later nodes of a request are already in its batch's plan."""
        for request in np.unique(self.nodes.request[nodes]).tolist():
            serial = int(self.requests.serial[request])
            if serial not in self._known and serial not in self._running:
                self._known.add(serial)
                self._arrived(WaitingRequest(serial, request))

    def remove_dropped(self, kind: int) -> None:
        """Do nothing: a dropped node is left out when its task comes, and the task runs without it."""

    def reportable(self, ended: list[CellRequest]) -> list[CellRequest]:
        """Return the requests whose whole batch has ended."""
        self._to_tell += ended
        finished = [one for one in self._to_tell if one.serial not in self._running]
        if finished:
            self._to_tell = [one for one in self._to_tell if one.serial in self._running]
        return finished

    def _is_wanted(self, one: WaitingRequest) -> bool:
        """Return whether the request was not cancelled; if it was, another may have its id."""
        is_same = self.requests.serial[one.request] == one.serial
        return bool(is_same and self.nodes.state[self.requests.start[one.request]] == WAITING)

    def _wanted(self, batch: Batch, nodes: np.ndarray) -> np.ndarray:
        """Return the nodes that were not dropped. Another request may have a dropped node's id."""
        is_wanted = self.nodes.state[nodes] == WAITING
        if (self.requests.serial[batch.requests] != batch.serials).any():
            is_wanted &= np.isin(self.requests.serial[self.nodes.request[nodes]], batch.serials)
        return nodes[is_wanted]

    def _arrived(self, one: WaitingRequest) -> None:
        """Add a waiting request."""
        raise NotImplementedError

    def _choose(self) -> list[WaitingRequest]:
        """Remove and return the requests of the next batch; empty if none waits."""
        raise NotImplementedError

    def _plan(self, requests: Sequence[int]) -> list[Task]:
        """Return the tasks of a batch, ordered so that inputs come first."""
        raise NotImplementedError
