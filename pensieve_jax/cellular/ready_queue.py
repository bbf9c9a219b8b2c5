"""Queue of ready nodes of one type, in the order in which their subgraphs were released.

Owns: this order, and a FIFO of integers that moves many at a time.
Does not know: which worker takes nodes, or why nodes become ready.

Subgraphs begin in the order of their release, so begun subgraphs precede the others. The queue has two parts.
The front holds ready nodes of begun subgraphs, about as many as are in flight. The FIFO holds nodes of
subgraphs that have not begun. It may be long, and only a cancellation scans it.
"""

from __future__ import annotations

import numpy as np

from pensieve_jax.cellular.tables import DROPPED, Nodes, Subgraphs

_NO_NODES = np.empty(0, np.int64)


class ReadyQueue:
    """Ready nodes (ids) of one type."""

    def __init__(self, nodes: Nodes, subgraphs: Subgraphs, *, num_workers: int) -> None:
        self._nodes, self._subgraphs, self._is_shared = nodes, subgraphs, num_workers > 1
        self._front = _NO_NODES
        self._fifo = IntFifo()

    def __len__(self) -> int:
        """Return the number of ready nodes, for all workers together."""
        return len(self._front) + len(self._fifo)

    def all_nodes(self) -> np.ndarray:
        """Return all ready nodes, in order."""
        return np.concatenate([self._front, self._fifo.values])

    def count(self, worker: int) -> int:
        """Return the number of nodes that `worker` may take: their subgraphs are unpinned or pinned to it."""
        if not self._is_shared:
            return len(self)
        return int(self._is_free_for(worker).sum()) + len(self._fifo)

    def release(self, nodes: np.ndarray) -> None:
        """Add nodes of newly released subgraphs. Nodes of one subgraph must be consecutive."""
        self._fifo.push(nodes)

    def go_on(self, nodes: np.ndarray) -> None:
        """Add nodes of subgraphs whose nodes have just been taken, in the same order."""
        self._front = np.concatenate([nodes, self._front])
        if self._is_shared:
            seq = self._subgraphs.seq[self._nodes.sub[self._front]]
            self._front = self._front[np.argsort(seq, kind="stable")]

    def take(self, worker: int, max_num: int) -> np.ndarray:
        """Take up to `max_num` nodes that `worker` may run. Front nodes whose inputs it holds come first."""
        if self._is_shared:
            places = np.flatnonzero(self._is_free_for(worker))
            if len(places) > max_num:
                home = self._nodes.worker[self._nodes.inputs[0, self._front[places]]]
                is_here = (home == worker) | (home < 0)
                places = np.concatenate([places[is_here], places[~is_here]])[:max_num]
                places.sort()
            taken = self._front[places]
            self._front = np.delete(self._front, places)
        else:
            taken, self._front = self._front[:max_num], self._front[max_num:]
        missing = max_num - len(taken)
        if missing and len(self._fifo):
            taken = np.concatenate([taken, self._begin_some(missing)])
        return taken

    def remove_dropped(self) -> None:
        """Remove nodes that were dropped."""
        state = self._nodes.state
        self._front = self._front[state[self._front] != DROPPED]
        self._fifo.keep(state[self._fifo.values] != DROPPED)

    def _begin_some(self, max_num: int) -> np.ndarray:
        """Take nodes from the FIFO. Move the rest of the last subgraph to the front, since it has begun."""
        taken = self._fifo.pop(max_num)
        sub, rest = self._nodes.sub, self._fifo.values
        if len(rest) and sub[rest[0]] == sub[taken[-1]]:
            is_other = sub[rest] != sub[taken[-1]]
            num = int(np.argmax(is_other)) if is_other.any() else len(rest)
            self._front = np.concatenate([self._front, self._fifo.pop(num)])
        return taken

    def _is_free_for(self, worker: int) -> np.ndarray:
        pinned = self._subgraphs.pinned[self._nodes.sub[self._front]]
        return (pinned < 0) | (pinned == worker)


class IntFifo:
    """First-in, first-out queue of i64 values."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._values = np.empty(1024, np.int64)
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def values(self) -> np.ndarray:
        """View of all values, in order, valid until the next change."""
        return self._values[self._begin : self._end]

    def push(self, values: np.ndarray) -> None:
        """Append values at the end."""
        if self._end + len(values) > len(self._values):
            waiting = self.values
            self._values = np.empty(max(1024, 2 * (len(waiting) + len(values))), np.int64)
            self._values[: len(waiting)] = waiting
            self._begin, self._end = 0, len(waiting)
        self._values[self._end : self._end + len(values)] = values
        self._end += len(values)

    def pop(self, num: int) -> np.ndarray:
        """Remove and return the first `num` values, or all if there are fewer."""
        taken = self.values[:num].copy()
        self._begin += len(taken)
        return taken

    def keep(self, is_kept: np.ndarray) -> None:
        """Keep only the values whose entry in `is_kept` is true."""
        kept = self.values[is_kept]
        self._values[self._begin : self._begin + len(kept)] = kept
        self._end = self._begin + len(kept)
