"""A worker that computes hashes in numpy, in program order, and reports completions on demand.

Owns rows of state, with poison in all free ones, and when a launch ends or fails. Does not know requests.
Called by the tests of the policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.launches import Done, Launch
from tests.cellular.hash_cells import token

POISON, UNKNOWN = -(2**40), -(2**41)


class FakeWorker:
    """One of several workers, `peers`, each with its own rows.

    Attributes:
        fails: how the next launch fails: "intact", "lost" or not at all.
        num_may_end: number of launches in flight that `poll` may report.
        is_lost: whether its rows are lost, until all launches since then have been reported.
    """

    def __init__(self, types: CellTypes, num_rows: int, peers: list[FakeWorker]) -> None:
        self._types, self._num_rows, self._peers = types, num_rows, peers
        self.rows = [np.full(num_rows + 1, POISON, np.int64) for _ in types.kinds]
        for rows in self.rows:
            rows[num_rows] = 0  # the initial state
        self._flying: deque[Done] = deque()
        self.is_lost = False
        self.fails = ""
        self.num_may_end = 0
        peers.append(self)

    @property
    def num_in_flight(self) -> int:
        return len(self._flying)

    @property
    def launches(self) -> list[Launch]:
        """Launches that are in flight."""
        return [done.launch for done in self._flying]

    def prepare(self, launch: Launch) -> bool:
        """Return True: a launch can always begin."""
        return True

    def launch(self, launch: Launch) -> None:
        sources = [self._peers[move.source] for move in launch.moves]
        if self.is_lost or any(source.is_lost for source in sources):
            self.is_lost = True
            error = RuntimeError("the rows were gone")
            self._flying.append(Done(launch, error=error, has_lost_state=True, never_ran=True))
            return
        for move, source in zip(launch.moves, sources, strict=True):
            self.rows[move.kind][move.to_rows] = source.rows[move.kind][move.rows]
        if self.fails:
            self.is_lost = self.fails == "lost"
            error = RuntimeError("told to fail")
            self._flying.append(Done(launch, error=error, has_lost_state=self.is_lost))
            self.fails = ""
            for part in launch.parts:  # later launches may read these, for requests that fail with it
                rows = part.words[:, 0].ravel()
                self.rows[launch.kind.state_kind][rows[rows < self._num_rows]] = UNKNOWN
            return
        emitted = [[] for _ in launch.kind.emits]
        for part in launch.parts:
            tasks = [self._run(launch, words) for words in part.words]
            for one in emitted:
                one.append(np.stack(tasks))
        states = [
            {name: self.rows[read.kind][read.rows].copy() for name, _ in self._types.kinds[read.kind]}
            for read in launch.reads
        ]
        self._flying.append(Done(launch, emitted, states))

    def poll(self) -> Iterable[Done]:
        while self._flying and self.num_may_end:
            self.num_may_end -= 1
            done = self._flying.popleft()
            if done.error is not None and done.has_lost_state and not self._lost_behind():
                self.is_lost = False
                for rows in self.rows:
                    rows[:-1] = POISON
            yield done

    def poison(self, free: list[np.ndarray]) -> None:
        """Poison these rows of each kind: they must be written before they are read."""
        for rows, mine in zip(self.rows, free, strict=True):
            rows[mine] = POISON

    def _lost_behind(self) -> bool:
        return any(done.never_ran for done in self._flying)

    def _run(self, launch: Launch, words: np.ndarray) -> np.ndarray:
        kind = launch.kind
        written, read, immediates = np.split(words, [1, 1 + len(kind.input_kinds)])
        values = [self.rows[one][rows] for one, rows in zip(kind.input_kinds, read, strict=True)]
        module = self._types.cells[kind.index].module
        stacked = np.array([*values, *immediates], np.int64).reshape(-1, words.shape[1])
        result = module.compute(stacked)
        is_used = written[0] <= self._num_rows
        assert (written[0][is_used] < self._num_rows).all(), "the initial state was overwritten"
        assert len(np.unique(written[0])) == len(written[0]), "a row was written twice in a task"
        for one in values:
            assert (one[is_used] != POISON).all(), "a row was read that no task wrote"
        self.rows[kind.state_kind][written[0][is_used]] = result[is_used]
        return token(result)
