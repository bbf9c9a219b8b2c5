"""Launches: the work that a worker begins at once.

Owns: the launch types, and the layout of their integers for a device.
Does not know: how nodes were chosen, or how a device computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pensieve_jax.cellular.cells import CellType
from pensieve_jax.cellular.config import TASKS_PER_PROGRAM


class Part(NamedTuple):
    """Consecutive tasks of one program.

    Attributes:
      words: i32[k, 1 + fan_in + immediates, B]: for each task and each of its nodes, the row to write, the
        rows to read, and the immediates. Padding reads the initial state and writes past all rows, which has
        no effect.
    """

    words: np.ndarray

    @property
    def num_tasks(self) -> int:
        return len(self.words)

    @property
    def batch_size(self) -> int:
        """Compiled batch size, B in the shape of `words`."""
        return self.words.shape[2]


class Read(NamedTuple):
    """States to read after the launch has run.

    Attributes:
      kind: kind of state.
      nodes: nodes whose states are read.
      rows: rows of these nodes.
    """

    kind: int
    nodes: np.ndarray
    rows: np.ndarray


class Move(NamedTuple):
    """Rows to copy from another device before the launch runs.

    Attributes:
      kind: kind of state.
      source: worker that has the rows.
      rows: rows on the source.
      to_rows: rows on this device.
    """

    kind: int
    source: int
    rows: np.ndarray
    to_rows: np.ndarray


@dataclass(eq=False, slots=True)
class Launch:
    """Tasks of one type for one worker: `Batch` of Algorithm 1.

    Attributes:
      worker: index of the worker.
      kind: type of the cells.
      tasks: nodes of each task.
      subs, counts: subgraphs, and the number of their nodes in the launch; a subgraph may occur repeatedly.
      parts: the tasks as padded device input.
      reads: states to read afterwards.
      moves: rows to copy beforehand.
    """

    worker: int
    kind: CellType
    tasks: list[np.ndarray]
    subs: np.ndarray
    counts: np.ndarray
    parts: list[Part]
    reads: list[Read] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """Nodes of all tasks."""
        return sum(map(len, self.tasks))


class Done(NamedTuple):
    """Report of a finished launch.

    Attributes:
      launch: the launch.
      emitted: for each emitted field of its type and each part, 32-bit numbers [k, B].
      states: for each of its reads, the fields [n, ...].
      error: why it failed; None if it succeeded.
      has_lost_state: whether all rows of the worker are lost, also those of other requests.
      never_ran: whether the error is that of an earlier launch, which lost the rows.
    """

    launch: Launch
    emitted: Sequence[Sequence[np.ndarray]] = ()
    states: Sequence[Mapping[str, np.ndarray]] = ()
    error: Exception | None = None
    has_lost_state: bool = False
    never_ran: bool = False


def make_parts(kind: CellType, tasks: Sequence[np.ndarray], num_rows: int, least: int = 0) -> list[Part]:
    """Group tasks into parts and pad them.

    Args:
      kind: type of the tasks.
      tasks: i32[1 + fan_in + immediates, n] of each task.
      num_rows: rows of each kind of state.
      least: smallest batch size, in nodes.
    """
    parts = []
    first = 0
    while first < len(tasks):
        num = max(k for k in TASKS_PER_PROGRAM if k <= len(tasks) - first)
        group = tasks[first : first + num]
        size = kind.batch_size(max(least, *(task.shape[1] for task in group)))
        words = np.zeros((num, len(group[0]), size), np.int32)
        for place, task in enumerate(group):
            used = task.shape[1]
            words[place, :, :used] = task
            if used < size:
                words[place, 0, used:] = np.arange(num_rows + 1, num_rows + 1 + size - used)
                words[place, 1 : 1 + len(kind.input_kinds), used:] = num_rows
        parts.append(Part(words))
        first += num
    return parts
