"""Padding: chains of similar lengths run side by side, all of them to the length of the longest.

Owns: the buckets by length, and which one is next.
Does not know: how tasks run.
Called by `cells.systems`.

There are two variants. The thesis' variant for MXNet and TensorFlow (section 2.7.1) serves buckets of equal
width in round robin, each padded to its upper limit. The strongest variant takes the bucket whose first
request is the oldest, and pads it to its longest member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.errors import GraphError
from pensieve_jax.cellular.formation import Formation
from pensieve_jax.cellular.graph_columns import NONE, GraphColumns
from pensieve_jax.cellular.tables import Tables
from pensieve_jax.core.errors import ConfigError
from pensieve_lab.cells.baselines.graph_batching import GraphBatching, Task, WaitingRequest

DEFAULT_WIDTH = 10
type _Bucket = tuple[tuple[int, ...], int]
"""Cell types of the chains, and the bucket number of the first chain's length."""


class Padding(GraphBatching):
    """Scheduler for chains, and for chains that follow each other."""

    def __init__(
        self,
        types: CellTypes,
        tables: Tables,
        formation: Formation,
        config: CellularConfig,
        *,
        width: int = DEFAULT_WIDTH,
        oldest_first: bool = False,
        max_batch: int | None = None,
    ) -> None:
        """Make a scheduler; an engine takes `functools.partial(Padding, width=..., oldest_first=...)`.

        Args:
          width: of a bucket; the first bucket holds lengths from 1 to `width`.
          oldest_first: use the strongest variant.
          max_batch: requests of a batch; None is the smallest of the largest batches of all cells.

        Raises:
          ConfigError: a width below 1, or a batch that is larger than a cell's.
        """
        super().__init__(types, tables, formation, config)
        self._width, self._oldest_first = width, oldest_first
        least = min(one.max_batch for one in types.types)
        self._most = least if max_batch is None else max_batch
        if width < 1:
            raise ConfigError("width", width, "a number of words of at least 1")
        if not 1 <= self._most <= least:
            raise ConfigError("max_batch", max_batch, f"from 1 to {least}, the largest batch of every cell")
        self._buckets: dict[_Bucket, deque[WaitingRequest]] = {}
        self._last_bucket: _Bucket = (), -1

    def check(self, parts: GraphColumns) -> None:
        """Raise GraphError unless each request is a chain, or a sequence of chains."""
        is_last = np.diff(parts.sub_request, append=-1) != 0
        behind = np.where(is_last, NONE, np.arange(1, len(is_last) + 1))
        # a single node is a chain, whatever its inputs
        is_no_chain = parts.is_irregular & (parts.sub_num_nodes > 1)
        wrong = np.flatnonzero(is_no_chain | (parts.sub_consumer != behind))
        if len(wrong):
            place = int(parts.sub_request[wrong[0]])
            raise GraphError(f"requests[{place}]", "a graph", "a chain, or chains one behind the other")

    def _arrived(self, one: WaitingRequest) -> None:
        subs = self._subs(one.request)
        sub = subs[0]
        length = int(self.subgraphs.last[sub] - self.subgraphs.first[sub] + 1)
        bucket = tuple(self.subgraphs.kind[subs].tolist()), (length - 1) // self._width
        self._buckets.setdefault(bucket, deque()).append(one)

    def _choose(self) -> list[WaitingRequest]:
        waiting = sorted(bucket for bucket, line in self._buckets.items() if line)
        if not waiting:
            return []
        if self._oldest_first:
            bucket = min(waiting, key=lambda one: self._buckets[one][0])
        else:
            bucket = next((one for one in waiting if one > self._last_bucket), waiting[0])
        self._last_bucket = bucket
        line = self._buckets[bucket]
        return [line.popleft() for _ in range(min(self._most, len(line)))]

    def _plan(self, requests: Sequence[int]) -> list[Task]:
        """Return the steps of the first chains of all requests, then those of the second chains."""
        tasks = []
        subs = np.array([self._subs(request) for request in requests]).T
        for of_all in subs:
            firsts = self.subgraphs.first[of_all]
            lengths = self.subgraphs.last[of_all] - firsts + 1
            num = int(lengths.max())
            if not self._oldest_first:
                num = -(-num // self._width) * self._width
            kind = self.types.types[int(self.subgraphs.kind[of_all[0]])]
            tasks += [Task(kind, firsts[lengths > step] + step, len(requests)) for step in range(num)]
        return tasks

    def _subs(self, request: int) -> np.ndarray:
        return np.arange(self.requests.sub_start[request], self.requests.sub_end[request])
