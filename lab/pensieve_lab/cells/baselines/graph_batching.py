"""Graph batching: whole requests form a batch, which runs to its end before the next one begins.

Owns: batches on their way, and when their requests may be told.
Does not know: which requests form a batch, or in which tasks it runs.

Thesis, section 2.2.3: such systems synchronise requests that need not be. They run the same cells here, in
the same programs, in batches of the same sizes, and begin a batch as soon as a device is free, without a
timeout (section 2.7.1). A batch is chosen and planned once all of the one before has been launched, while
that still runs: a device runs launches in order. No more than one batch is ahead, so that it is chosen late.
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
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.parts import GraphColumns
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.tables import WAITING, Tables

_MOST_BATCHES = 2  # of a worker: the one that runs, and the next


class Waiting(NamedTuple):
    """A request that waits.

    Attributes:
      serial: its number among all that ever came: the smaller, the older.
      request: its id.
    """

    serial: int
    request: int


class Task(NamedTuple):
    """A step of a batch.

    Attributes:
      kind: the type.
      nodes: those that compute something.
      room: nodes of its batch, those included that compute nothing any more.
    """

    kind: CellType
    nodes: np.ndarray
    room: int


@dataclass(slots=True)
class Batch:
    """Requests that run together.

    Attributes:
      requests: their ids, which may be those of others before the batch has ended: after a cancellation.
      serials: their numbers.
      tasks: that were not launched.
      num_in_flight: launches of it.
    """

    requests: np.ndarray
    serials: np.ndarray
    tasks: deque[Task]
    num_in_flight: int = 0


class GraphBatching:
    """What all graph batching has in common; a subclass says `_arrived`, `_choose` and `_plan`."""

    def __init__(
        self, types: CellTypes, tables: Tables, formation: Formation, config: CellularConfig
    ) -> None:
        """Nobody waits."""
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
        """Any graph runs."""

    def schedule(self, worker: int) -> Launch | None:
        """The next tasks of the last batch of a worker, or the first of a new one."""
        batches = self._batches[worker]
        if not batches or not batches[-1].tasks:
            batch = self.next_batch() if len(batches) < _MOST_BATCHES else None
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
        """Requests that wait no more, and the tasks that serve them; None if nobody waits."""
        while chosen := self._choose():
            self._known.difference_update(one.serial for one in chosen)
            wanted = [one for one in chosen if self._is_wanted(one)]
            if wanted:
                serials, requests = map(list, zip(*wanted, strict=True))
                self._running.update(serials)
                return Batch(np.array(requests), np.array(serials), deque(self._plan(requests)))
        return None

    def completed(self, launch: Launch) -> None:
        """Its tasks run no more."""
        batch = self._of_launch.pop(launch)
        batch.num_in_flight -= 1
        if not batch.tasks and not batch.num_in_flight:
            self._batches[launch.worker].popleft()
            self._running.difference_update(batch.serials.tolist())

    def release(self, kind: int, nodes: np.ndarray) -> None:
        """Requests may begin; what they release later is in the plan of their batch."""
        for request in np.unique(self.nodes.request[nodes]).tolist():
            serial = int(self.requests.serial[request])
            if serial not in self._known and serial not in self._running:
                self._known.add(serial)
                self._arrived(Waiting(serial, request))

    def remove_dropped(self, kind: int) -> None:
        """Nothing to do: what was dropped is left out when its task comes, which runs without it."""

    def reportable(self, ended: list[CellRequest]) -> list[CellRequest]:
        """Requests are told when their whole batch has ended."""
        self._to_tell += ended
        told = [one for one in self._to_tell if one.serial not in self._running]
        if told:
            self._to_tell = [one for one in self._to_tell if one.serial in self._running]
        return told

    def _is_wanted(self, one: Waiting) -> bool:
        """Whether it was not cancelled while it waited; its id may be another's then."""
        is_same = self.requests.serial[one.request] == one.serial
        return bool(is_same and self.nodes.state[self.requests.start[one.request]] == WAITING)

    def _wanted(self, batch: Batch, nodes: np.ndarray) -> np.ndarray:
        """Those that nobody dropped; others may have their ids then."""
        is_wanted = self.nodes.state[nodes] == WAITING
        if (self.requests.serial[batch.requests] != batch.serials).any():
            is_wanted &= np.isin(self.requests.serial[self.nodes.request[nodes]], batch.serials)
        return nodes[is_wanted]

    def _arrived(self, one: Waiting) -> None:
        """A request waits."""
        raise NotImplementedError

    def _choose(self) -> list[Waiting]:
        """The requests of the next batch, which wait no more; none if nobody waits."""
        raise NotImplementedError

    def _plan(self, requests: Sequence[int]) -> list[Task]:
        """The tasks of a batch, in an order in which inputs come first."""
        raise NotImplementedError
