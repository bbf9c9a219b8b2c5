"""Fast partition of graphs that consist of chains, each of one cell type: sentences, encoder-decoders.

Owns: the columns (`GraphColumns`) of such graphs, which take only a few array operations.
Does not know: graphs with other shapes; `partition` handles them.

Most served requests have this form. At low load they arrive one by one, so a request costs about as much as
its number of array operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pensieve_jax.cellular.graph import Graph
from pensieve_jax.cellular.graph_batch import NO_NODE
from pensieve_jax.cellular.graph_columns import NO_STOP, NONE, GraphColumns, Several

_NO_VALUES = Several(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int64))


def partition(graph: Graph, *, max_depth: int) -> GraphColumns | None:
    """Return the columns of the requests' graphs; None if this module does not support their form.

    In a supported graph each chain is a subgraph. Only the last node of a chain may be returned or read by
    another chain, and no two chains read the same node.
    """
    if not graph.has_only_chains:
        return None
    ends = np.array(graph.ends, np.int64).T
    counts = ends.copy()
    counts[:, 1:] -= ends[:, :-1]
    if counts[0].max() > max_depth:
        return None
    starts = np.array([piece.start for piece in graph.pieces], np.int64)
    afters = np.array([piece.after for piece in graph.pieces], np.int64)
    kinds = np.array([piece.kind for piece in graph.pieces], np.int16)
    sizes = np.append(starts[1:], graph.num_nodes) - starts
    lasts = starts + sizes - 1
    sub = np.arange(len(starts)).repeat(sizes)
    sub_request = np.arange(len(graph.ends)).repeat(counts[1])
    is_linked = afters != NO_NODE
    node_columns = _nodes(graph, starts, lasts, afters, sub[afters[is_linked]])
    if node_columns is None:
        return None
    sub_consumer = np.full(len(starts), NONE, np.int64)
    sub_consumer[sub[afters[is_linked]]] = is_linked.nonzero()[0]
    stops = np.array([NO_STOP if piece.stop is None else piece.stop for piece in graph.pieces], np.int64)
    return GraphColumns(
        kind=kinds[sub],
        request=sub_request[sub],
        sub=sub,
        consumers=_NO_VALUES,
        stop=stops[sub],
        chain_end=lasts[sub] + 1,
        sub_request=sub_request,
        sub_kind=kinds,
        sub_num_nodes=sizes,
        sub_last=lasts,
        is_irregular=~np.array([one.is_chained for one in graph.types.types])[kinds],
        sub_waits=is_linked.astype(np.int64),
        sub_consumer=sub_consumer,
        sub_consumers=_NO_VALUES,
        first=starts,
        firsts=_NO_VALUES,
        request_nodes=ends[0],
        request_subs=ends[1],
        num_returned=counts[2],
        rows=_rows(graph, kinds, kinds[sub[afters]], is_linked, sub_request),
        **node_columns,
    )


def _nodes(
    graph: Graph, starts: np.ndarray, lasts: np.ndarray, afters: np.ndarray, linked: np.ndarray
) -> dict[str, Any] | None:
    """Return the columns that depend on inputs; None if an input is not supported.

    `afters` is the node that each chain continues. `linked` is the chain of that node, for each chain that
    continues another.
    """
    num = graph.num_nodes
    inputs = np.full((max(graph.types.max_fan_in, 1), num), NO_NODE, np.int64)
    inputs[0] = np.arange(-1, num - 1)
    inputs[0, starts] = afters
    consumer = np.arange(1, num + 1)
    consumer[lasts] = NONE
    waits = np.ones(num, np.int64)
    waits[starts] = 0
    uses = np.ones(num, np.int64)
    uses[lasts] = 0
    returned = np.full(num, -1, np.int32)
    if graph.returned:
        uses[graph.returned] = 1  # `has_only_chains` ensures that these are last nodes
        returned[graph.returned] = graph.places
    if len(linked):
        read = afters[afters != NO_NODE]
        if (read != lasts[linked]).any() or uses[read].any() or len(np.unique(read)) < len(read):
            return None
        uses[read] = 1
    return {"inputs": inputs, "consumer": consumer, "waits": waits, "uses": uses, "returned": returned}


def _rows(
    graph: Graph, kinds: np.ndarray, kinds_before: np.ndarray, is_linked: np.ndarray, sub_request: np.ndarray
) -> np.ndarray:
    """Return the column `rows`: a row per chain, unless it continues in the row of the chain it reads."""
    states = np.array([one.state_kind for one in graph.types.types])
    state = states[kinds]
    needs_row = ~is_linked | (states[kinds_before] != state)
    num_requests, num_kinds = len(graph.ends), len(graph.types.kinds)
    counts = np.bincount((sub_request * num_kinds + state)[needs_row], minlength=num_requests * num_kinds)
    return counts.reshape(num_requests, num_kinds)
