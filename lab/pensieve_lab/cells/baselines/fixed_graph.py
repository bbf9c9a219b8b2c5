"""The ideal scheduler for requests of one fixed graph: one task per cell, in order, for the whole batch.

Owns: that order.
Does not know: how tasks run.
Called by `cells.systems`.

The thesis hardcodes a tree of 16 leaves in TensorFlow this way (section 2.7.5): 31 cells with full batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular.errors import GraphError
from pensieve_jax.cellular.graph_columns import GraphColumns
from pensieve_lab.cells.baselines.graph_batching import Task
from pensieve_lab.cells.baselines.graph_merging import GraphMerging


class FixedGraph(GraphMerging):
    """Scheduler for requests with equal graphs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take `GraphMerging`'s arguments. The first request sets the graph; a task is one node of all."""
        super().__init__(*args, **options)
        self._most = min(self._most, *(kind.max_batch for kind in self.types.types))
        self._graph: tuple[np.ndarray, np.ndarray] | None = None

    def check(self, parts: GraphColumns) -> None:
        """Raise GraphError for a graph that differs from that of the first request."""
        start, first = 0, self._graph
        for place, end in enumerate(parts.request_nodes.tolist()):
            inputs = parts.inputs[:, start:end]
            graph = parts.kind[start:end], np.where(inputs < 0, inputs, inputs - start)
            first = graph if first is None else first
            if not all(map(np.array_equal, graph, first)):
                raise GraphError(f"requests[{place}]", "another graph", "the graph of the first request")
            start = end
        self._graph = first

    def _plan(self, requests: Sequence[int]) -> list[Task]:
        starts = self.requests.start[list(requests)]
        kinds = self.nodes.kind[starts[0] : self.requests.end[requests[0]]]
        return [
            Task(self.types.types[kind], starts + node, len(requests))
            for node, kind in enumerate(kinds.tolist())
        ]
