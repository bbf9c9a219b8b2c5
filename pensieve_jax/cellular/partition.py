"""Partition of user graphs into subgraphs with dependencies and row counts, for many requests at once.

Owns: all data derived from graphs alone: consumers, nodes that may begin, and the most rows that are needed.
Does not know: which nodes have run.
"""

from __future__ import annotations

import numpy as np

from pensieve_jax.cellular import chains
from pensieve_jax.cellular.errors import CapacityError
from pensieve_jax.cellular.graph import Graph
from pensieve_jax.cellular.graph_batch import NO_NODE
from pensieve_jax.cellular.graph_columns import MANY, NO_STOP, NONE, GraphColumns, Several


def partition(graph: Graph, *, max_depth: int) -> GraphColumns:
    """Derive the columns of the graphs.

    Raises:
      CapacityError: a path of a request is longer than `max_depth`.
    """
    found = chains.partition(graph, max_depth=max_depth)
    return _partition(graph, max_depth=max_depth) if found is None else found


def _partition(graph: Graph, *, max_depth: int) -> GraphColumns:
    """Partition any graphs, also those that `chains.partition` does not support."""
    num, pieces = graph.num_nodes, graph.pieces
    starts = np.array([piece.start for piece in pieces], np.int64)
    sizes = np.diff(starts, append=num)
    kind = np.repeat(np.array([piece.kind for piece in pieces], np.int16), sizes)
    inputs = _inputs(graph, starts, num)
    sub, first_node = _subgraphs(graph, starts, sizes)
    ends = np.array(graph.ends, np.int64)
    request = np.repeat(np.arange(len(ends)), np.diff(ends[:, 0], prepend=0))
    _check_depth(inputs, request, ends, max_depth)
    is_read = inputs != NO_NODE
    is_inner = is_read & (sub[inputs] == sub)
    node = np.broadcast_to(np.arange(num), inputs.shape)
    consumer, consumers = _by_key(inputs[is_inner], node[is_inner], num)
    outer = is_read & ~is_inner
    num_subs = len(first_node)
    source, reader = _distinct_pairs(sub[inputs[outer]], sub[node[outer]], num_subs)
    sub_consumer, sub_consumers = _by_key(source, reader, num_subs)
    begins = np.flatnonzero(~is_inner.any(axis=0))
    first, firsts = _by_key(sub[begins], begins, num_subs)
    returned, num_returned = _returned(graph, ends)
    stops = np.array([NO_STOP if piece.stop is None else piece.stop for piece in pieces], np.int64)
    uses = np.bincount(inputs[is_read], minlength=num) + (returned >= 0)
    sub_request = request[first_node]
    sub_last = np.zeros(num_subs, np.int64)
    sub_last[sub] = np.arange(num)
    return GraphColumns(
        kind=kind,
        request=request,
        sub=sub,
        inputs=inputs,
        waits=is_inner.sum(axis=0),
        consumer=consumer,
        consumers=consumers,
        uses=uses,
        returned=returned,
        stop=np.repeat(stops, sizes),
        chain_end=np.repeat(starts + sizes, sizes),
        sub_request=sub_request,
        sub_kind=kind[first_node],
        sub_num_nodes=np.bincount(sub, minlength=num_subs),
        sub_last=sub_last,
        is_irregular=_is_irregular(graph, kind, sub, inputs, is_inner, uses, sub_last),
        sub_waits=np.bincount(reader, minlength=num_subs),
        sub_consumer=sub_consumer,
        sub_consumers=sub_consumers,
        first=first,
        firsts=firsts,
        request_nodes=ends[:, 0],
        request_subs=np.cumsum(np.bincount(sub_request, minlength=len(ends))),
        num_returned=num_returned,
        rows=_rows(graph, kind, inputs, uses, request, len(ends)),
    )


def _inputs(graph: Graph, starts: np.ndarray, num: int) -> np.ndarray:
    """Return i64[fan_in, nodes], the node that each input reads."""
    inputs = np.full((max(graph.types.max_fan_in, 1), num), NO_NODE, np.int64)
    inputs[0] = np.arange(num) - 1
    inputs[0, starts] = [piece.after for piece in graph.pieces]
    for piece in graph.pieces:
        if piece.inputs is not None:
            end = piece.start + len(piece.inputs)
            inputs[0, piece.start : end] = NO_NODE
            inputs[: piece.inputs.shape[1], piece.start : end] = piece.inputs.T
    return inputs


def _subgraphs(graph: Graph, starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the subgraph of every node, and the first node of every subgraph, in the order of these."""
    label = np.array([piece.label for piece in graph.pieces], np.int64)
    nodes_are_subgraphs = np.array([piece.nodes_are_subgraphs for piece in graph.pieces])
    if nodes_are_subgraphs.any():  # then expand to nodes; otherwise work on pieces, which are fewer
        apart = np.repeat(nodes_are_subgraphs, sizes)
        label = np.repeat(label, sizes) + np.where(
            apart, np.arange(graph.num_nodes) - np.repeat(starts, sizes), 0
        )
        starts, sizes = np.arange(graph.num_nodes), np.ones(graph.num_nodes, np.int64)
    roots = _roots(graph.joined)[label]
    _, first, sub = np.unique(roots, return_index=True, return_inverse=True)
    return np.repeat(sub, sizes), starts[first]


def _roots(joined: list[int]) -> np.ndarray:
    roots = np.array(joined, np.int64)
    while (roots[roots] != roots).any():
        roots = roots[roots]
    return roots


def _returned(graph: Graph, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each node's index in its request's result (-1 if none), and each request's number of states."""
    counts = np.diff(ends[:, 2], prepend=0)
    places = np.arange(len(graph.returned)) - np.repeat(ends[:, 2] - counts, counts)
    returned = np.full(graph.num_nodes, -1, np.int32)
    returned[graph.returned] = places
    return returned, counts


def _distinct_pairs(firsts: np.ndarray, seconds: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct pairs of these numbers, which are below `limit`, sorted."""
    pairs = firsts * limit + seconds
    if len(pairs):
        pairs = np.unique(pairs)
    return pairs // limit, pairs % limit


def _by_key(keys: np.ndarray, values: np.ndarray, num_keys: int) -> tuple[np.ndarray, Several]:
    """Return each key's only value, or `NONE` or `MANY`, and the values of the keys with several."""
    only = np.full(num_keys, NONE, np.int64)
    only[keys] = values
    counts = np.bincount(keys, minlength=num_keys)
    many = np.flatnonzero(counts > 1)
    only[many] = MANY
    if not len(many):
        return only, Several(many, np.zeros(1, np.int64), many)
    has_more = counts[keys] > 1
    keys, values = keys[has_more], values[has_more]
    order = np.argsort(keys, kind="stable")
    return only, Several(many, np.concatenate([[0], np.cumsum(counts[many])]), values[order])


def _is_irregular(
    graph: Graph,
    kind: np.ndarray,
    sub: np.ndarray,
    inputs: np.ndarray,
    is_inner: np.ndarray,
    uses: np.ndarray,
    sub_last: np.ndarray,
) -> np.ndarray:
    """Return the column `is_irregular` of `GraphColumns`."""
    types = graph.types.types
    makes_chains = np.array([one.is_chained for one in types])[kind]
    node = np.arange(len(kind))
    is_last = sub_last[sub] == node
    fits = makes_chains & (is_last | (uses == 1))
    follows = ~is_inner[0] | (inputs[0] == node - 1)
    is_first = np.ones(len(kind), bool)
    is_first[1:] = sub[1:] != sub[:-1]
    irregular = np.zeros(len(sub_last), bool)
    irregular[sub[~(fits & follows & (is_first != is_inner[0]))]] = True
    return irregular


def _rows(
    graph: Graph,
    kind: np.ndarray,
    inputs: np.ndarray,
    uses: np.ndarray,
    request: np.ndarray,
    num_requests: int,
) -> np.ndarray:
    """Return [requests, kinds], numbers of rows that suffice for any order of nodes.

    A node takes over the row of an input of its kind that no other node needs. Every other node begins a new
    row. So the number of these other nodes suffices.
    """
    types = graph.types
    is_read = inputs != NO_NODE
    state = np.array([one.state_kind for one in types.types])[kind]
    takes_over = (is_read & (uses[inputs] == 1) & (state[inputs] == state)).any(axis=0)
    num_kinds = len(types.kinds)
    begun = np.bincount(
        request[~takes_over] * num_kinds + state[~takes_over], minlength=num_requests * num_kinds
    )
    return begun.reshape(num_requests, num_kinds)


def _check_depth(inputs: np.ndarray, request: np.ndarray, ends: np.ndarray, max_depth: int) -> None:
    sizes = np.diff(ends[:, 0], prepend=0)
    for one in np.flatnonzero(sizes > max_depth).tolist():
        end = int(ends[one, 0])
        start = end - int(sizes[one])
        depth = [0] * int(sizes[one])
        for node, sources in enumerate(inputs[:, start:end].T.tolist()):
            depth[node] = 1 + max((depth[s - start] for s in sources if s != NO_NODE), default=0)
            if depth[node] > max_depth:
                field = f"nodes[{node}]" if len(ends) == 1 else f"requests[{one}].nodes[{node}]"
                raise CapacityError(field, depth[node], f"at most max_depth ({max_depth}) deep")
