"""Formation of tasks: the rows that nodes read and write, and the nodes that become ready next.

Owns: rows of nodes while tasks are formed, `UpdateNodesDependency` of Algorithm 1 within subgraphs, and the
resulting `Launch`.
Does not know: which nodes to take, or when a launch completes.

Array operations handle all nodes of a task at once. A node takes over the row of an input that no other node
needs, so a chain keeps its row, and a tree's node overwrites one of its children. Rows that are freed while a
launch is formed are available to the next launch, which the device runs later.
"""

from __future__ import annotations

import numpy as np

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.launches import Launch, Move, Read, make_parts
from pensieve_jax.cellular.ready_queue import ReadyQueue
from pensieve_jax.cellular.rows import StateRows
from pensieve_jax.cellular.tables import INITIAL, SUBMITTED, WAITING, Nodes, Subgraphs, all_values, distinct


class Formation:
    """Builder of the launches of all workers, one launch at a time.

    Attributes:
      rows: rows by worker and kind of state.
      num_moved: rows that were copied between devices.
    """

    def __init__(
        self, types: CellTypes, nodes: Nodes, subgraphs: Subgraphs, *, num_rows: int, num_workers: int
    ) -> None:
        """Start with all rows free."""
        self._nodes, self._subgraphs = nodes, subgraphs
        self._num_rows, self._is_shared = num_rows, num_workers > 1
        self._kind_of_state = np.array([one.state_kind for one in types.types])
        self.rows = [[StateRows(num_rows) for _ in types.kinds] for _ in range(num_workers)]
        self.num_moved = 0
        self._tasks: list[np.ndarray] = []
        self._subs: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._wanted: list[np.ndarray] = []
        self._words: list[np.ndarray] = []
        self._moves: list[Move] = []
        self._freed: list[tuple[int, int, np.ndarray]] = []  # worker, kind and rows

    def add(self, kind: CellType, worker: int, taken: np.ndarray) -> np.ndarray:
        """Form a task of `taken`; return the nodes that become ready, in the same order of subgraphs."""
        nodes, subgraphs = self._nodes, self._subgraphs
        sources = nodes.inputs[: len(kind.input_kinds), taken]
        if self._is_shared:
            self._fetch(kind, worker, sources)
        read = nodes.row[sources]
        written = self._write(kind, worker, taken, sources, read)
        immediates = nodes.immediates[: len(kind.immediates), taken]
        self._words.append(np.concatenate([written[None], read, immediates]))
        self._tasks.append(taken)
        subs = nodes.sub[taken]
        np.subtract.at(subgraphs.unsubmitted, subs, 1)
        np.add.at(subgraphs.in_flight, subs, 1)
        subgraphs.pinned[subs] = worker
        self._remember(subs, np.ones(len(subs), np.int64), taken)
        return self._ready_behind(taken)

    def add_chains(
        self, kind: CellType, worker: int, queue: ReadyQueue, *, max_tasks: int, min_nodes: int
    ) -> int:
        """Form up to `max_tasks` tasks, all but the first of at least `min_nodes` nodes; return their number.

        The result equals repeated calls of `add` if all subgraphs of the type are chains, whose nodes have
        consecutive ids and keep their row. So the data of a chain is read and written once, not per task: a
        chain becomes a *lane*, with the first task that it joins and the number of its nodes in the launch.
        """
        assert kind.is_chained, "a lane keeps its row, so its input must be of the kind of its state"
        last_nodes, sub = self._subgraphs.last, self._nodes.sub
        joining = queue.take(worker, kind.max_batch)
        subs = sub[joining]
        left = last_nodes[subs] - joining + 1
        lanes, lanes_subs, lanes_left, nums = [joining], [subs], [left], [len(joining)]
        num_active = len(joining)
        ended = np.bincount(
            np.minimum(left, max_tasks), minlength=max_tasks + 1
        )  # by task: lanes that ended before it
        num_tasks = 1
        while num_tasks < max_tasks:
            num_active -= int(ended[num_tasks])
            if num_active + queue.count(worker) < min_nodes:
                break
            if num_active < kind.max_batch and len(queue):
                joining = queue.take(worker, kind.max_batch - num_active)
                if len(joining):
                    subs = sub[joining]
                    left = last_nodes[subs] - joining + 1
                    ended += np.bincount(np.minimum(num_tasks + left, max_tasks), minlength=max_tasks + 1)
                    lanes.append(joining)
                    lanes_subs.append(subs)
                    lanes_left.append(left)
                    num_active += len(joining)
                nums.append(len(joining))
            else:
                nums.append(0)
            num_tasks += 1
        first, subs, left = (_joined(one) for one in (lanes, lanes_subs, lanes_left))
        joins = np.repeat(np.arange(len(nums)), nums)
        counts = np.minimum(left, num_tasks - joins)
        self._add_lanes(kind, worker, first, subs, joins, counts)
        goes_on = counts < left
        behind = (first + counts)[goes_on]
        self._nodes.waits[behind] = 0
        queue.go_on(behind)
        return num_tasks

    def launch(self, kind: CellType, worker: int, *, least: int = 0) -> Launch:
        """Return a launch of all tasks since the last one, padded to at least `least` nodes.

        Rows that these tasks freed are available to later launches.
        """
        parts = make_parts(kind, self._words, self._num_rows, least)
        subs, counts, wanted = (_joined(one) for one in (self._subs, self._counts, self._wanted))
        launch = Launch(worker, kind, self._tasks, subs, counts, parts, moves=self._moves)
        if len(wanted):
            launch.reads.append(Read(kind.state_kind, wanted, self._nodes.row[wanted]))
            self._nodes.uses[wanted] -= 1
            self._free(wanted[self._nodes.uses[wanted] == 0])
        self._tasks, self._words, self._moves = [], [], []
        self._subs, self._counts, self._wanted = [], [], []
        self.release_freed()
        return launch

    def undo_reads(self, nodes: np.ndarray) -> None:
        """Undo reads by nodes that will not be submitted: one read for each occurrence in `nodes`.

        `INITIAL` may be among them.
        """
        np.subtract.at(self._nodes.uses, nodes, 1)
        once = np.unique(nodes)
        is_held = (self._nodes.row[once] >= 0) & (once != INITIAL)
        self._free(once[is_held & (self._nodes.uses[once] == 0)])

    def release_freed(self) -> None:
        """Make freed rows available, after all launches that read them have been formed."""
        for worker, kind, rows in self._freed:
            self.rows[worker][kind].free(rows)
        self._freed.clear()

    def _write(
        self, kind: CellType, worker: int, taken: np.ndarray, sources: np.ndarray, read: np.ndarray
    ) -> np.ndarray:
        """Choose the rows that the nodes write, and count down the uses of their inputs."""
        nodes = self._nodes
        written = np.empty(len(taken), np.int32)
        is_placed = np.zeros(len(taken), bool)
        is_last = (nodes.uses[sources] == 1) & (sources != INITIAL)
        for slot, input_kind in enumerate(kind.input_kinds):
            if input_kind == kind.state_kind:
                here = is_last[slot] & ~is_placed
                written[here] = read[slot, here]
                is_placed |= here
                nodes.row[sources[slot, here]] = -1
        is_new = ~is_placed
        written[is_new] = self.rows[worker][kind.state_kind].allocate(int(is_new.sum()))
        nodes.row[taken], nodes.worker[taken], nodes.state[taken] = written, worker, SUBMITTED
        self._have_read(sources.ravel())
        self._free(taken[nodes.uses[taken] == 0])
        return written

    def _have_read(self, sources: np.ndarray) -> None:
        """Count one use less for each occurrence in `sources`, and free rows without further uses."""
        nodes = self._nodes
        np.subtract.at(nodes.uses, sources, 1)
        gone = sources[(nodes.uses[sources] == 0) & (nodes.row[sources] >= 0) & (sources != INITIAL)]
        if len(gone):
            self._free(np.unique(gone))

    def _add_lanes(
        self,
        kind: CellType,
        worker: int,
        first: np.ndarray,
        subs: np.ndarray,
        joins: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Add tasks of lanes: lane i has `counts[i]` nodes from `first[i]`, one per task from `joins[i]`."""
        nodes, subgraphs = self._nodes, self._subgraphs
        sources = nodes.inputs[:1, first]
        if self._is_shared:
            self._fetch(kind, worker, sources)
        sources = sources[0]
        read = nodes.row[sources]
        is_last = (nodes.uses[sources] == 1) & (sources != INITIAL)
        rows, is_new = read.copy(), ~is_last
        rows[is_new] = self.rows[worker][kind.state_kind].allocate(int(np.count_nonzero(is_new)))
        own = sources[is_last]
        nodes.row[own], nodes.uses[own] = -1, 0
        others = sources[is_new & (sources != INITIAL)]
        if len(others):
            self._have_read(others)
        num_tasks = int((joins + counts).max())
        place = np.arange(num_tasks)[:, None] - joins  # [tasks, lanes]: index of the node within its lane
        is_there = (place >= 0) & (place < counts)
        taken = (first + place)[is_there]
        words = np.empty((2 + len(kind.immediates), len(taken)), np.int32)
        words[0] = np.broadcast_to(rows, place.shape)[is_there]
        words[1] = np.where(place == 0, read, rows)[is_there]
        words[2:] = nodes.immediates[: len(kind.immediates), taken]
        sizes = is_there.sum(axis=1).tolist()
        begin = 0
        for size in sizes:
            self._tasks.append(taken[begin : begin + size])
            self._words.append(words[:, begin : begin + size])
            begin += size
        tails = first + counts - 1
        uses = nodes.uses[tails]
        nodes.row[tails], nodes.worker[tails] = rows, worker
        nodes.uses[taken], nodes.state[taken] = 0, SUBMITTED
        nodes.uses[tails] = uses
        self._free(tails[uses == 0])
        subgraphs.unsubmitted[subs] -= counts
        subgraphs.in_flight[subs] += counts
        subgraphs.pinned[subs] = worker
        self._remember(subs, counts, tails)

    def _remember(self, subs: np.ndarray, counts: np.ndarray, nodes: np.ndarray) -> None:
        """Record subgraphs with `counts` nodes each in the launch, and which of `nodes` are returned."""
        self._subs.append(subs)
        self._counts.append(counts)
        self._wanted.append(nodes[self._nodes.returned[nodes] >= 0])

    def _free(self, nodes: np.ndarray) -> None:
        """Free the rows of nodes whose states are no longer needed."""
        if not len(nodes):
            return
        table = self._nodes
        states = self._kind_of_state[table.kind[nodes]]
        keys = table.worker[nodes].astype(np.int64) * len(self.rows[0]) + states
        for key in np.unique(keys).tolist():
            worker, kind = divmod(key, len(self.rows[0]))
            self._freed.append((worker, kind, table.row[nodes[keys == key]]))
        table.row[nodes] = -1

    def _fetch(self, kind: CellType, worker: int, sources: np.ndarray) -> None:
        """Move states of other devices into rows of this one."""
        table = self._nodes
        for slot, input_kind in enumerate(kind.input_kinds):
            places = table.worker[sources[slot]]
            is_away = (places != worker) & (places >= 0)
            if not is_away.any():
                continue
            away = np.unique(sources[slot, is_away])
            for source in np.unique(table.worker[away]).tolist():
                there = away[table.worker[away] == source]
                old, new = table.row[there], self.rows[worker][input_kind].allocate(len(there))
                self._freed.append((source, input_kind, old))
                table.row[there], table.worker[there] = new, worker
                self._moves.append(Move(input_kind, source, old, new))
                self.num_moved += len(there)

    def _ready_behind(self, taken: np.ndarray) -> np.ndarray:
        """Return the nodes of the same subgraphs that waited only for `taken`."""
        table = self._nodes
        behind = all_values(taken, table.consumer, table.consumers)
        behind = behind[behind >= 0]
        np.subtract.at(table.waits, behind, 1)
        ready = behind[(table.waits[behind] == 0) & (table.state[behind] == WAITING)]
        return distinct(ready, table.mark)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
