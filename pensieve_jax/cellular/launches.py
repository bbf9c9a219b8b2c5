"""What a worker is asked to do at once.

Owns: launches, and how their numbers are laid out for a device.
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
    """Tasks that one program runs, one after the other.

    Attributes:
      words: i32[k, 1 + fan_in + immediates, B]: for each task and node of it the row to write, the rows to
        read, and its immediates. A batch that is not full reads the initial state and writes behind all rows,
        which writes nothing.
    """

    words: np.ndarray

    @property
    def num_tasks(self) -> int:
        return len(self.words)

    @property
    def batch_size(self) -> int:
        """Nodes for which a task has room: B in the shape of `words`."""
        return self.words.shape[2]


class Read(NamedTuple):
    """States that are wanted, once the launch has run.

    Attributes:
      kind: of state.
      nodes: whose.
      rows: where they are.
    """

    kind: int
    nodes: np.ndarray
    rows: np.ndarray


class Move(NamedTuple):
    """Rows that are needed on another device, before the launch runs.

    Attributes:
      kind: of state.
      source: the worker that has them.
      rows: where they are there.
      to_rows: where they are to be.
    """

    kind: int
    source: int
    rows: np.ndarray
    to_rows: np.ndarray


@dataclass(eq=False, slots=True)
class Launch:
    """Tasks of one type for one worker: `Batch` of Algorithm 1.

    Attributes:
      worker: its index.
      kind: the type.
      tasks: nodes of each.
      subs, counts: subgraphs, and how many nodes of them are in it; one may be there more than once.
      parts: the same for the device, padded.
      reads: states that are wanted after it.
      moves: rows that are needed before it.
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
        """Nodes that all tasks have together."""
        return sum(map(len, self.tasks))


class Done(NamedTuple):
    """What a worker tells of a launch.

    Attributes:
      launch: which.
      emitted: for each field that its type emits and each part, 32-bit numbers [k, B].
      states: for each of its reads the fields [n, ...].
      error: why it failed; None if it did not.
      has_lost_state: whether all rows of the worker are gone, whoever's they were.
      never_ran: whether the error is of an earlier launch, with which the rows went.
    """

    launch: Launch
    emitted: Sequence[Sequence[np.ndarray]] = ()
    states: Sequence[Mapping[str, np.ndarray]] = ()
    error: Exception | None = None
    has_lost_state: bool = False
    never_ran: bool = False


def make_parts(kind: CellType, tasks: Sequence[np.ndarray], num_rows: int, least: int = 0) -> list[Part]:
    """Lay out the words of tasks.

    Args:
      kind: their type.
      tasks: i32[1 + fan_in + immediates, n] of each.
      num_rows: of each kind of state.
      least: nodes for which each batch is to have room.
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
