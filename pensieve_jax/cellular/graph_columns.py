"""Data derived from the graphs of requests, as columns of nodes, subgraphs and requests.

Owns: the names of the columns, and the markers `NONE` and `MANY`.
Does not know: how the columns are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NONE, MANY = -1, -2
"""Markers instead of the id of a node or subgraph: no id, and several ids."""
NO_STOP = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Several:
    """Values of the keys that are `MANY` in a column, which holds the only value of every other key.

    Attributes:
      keys: sorted keys.
      starts: index of each key's first value; one more entry than keys.
      values: values of all keys.
    """

    keys: np.ndarray
    starts: np.ndarray
    values: np.ndarray

    def items(self, shift_keys: int, shift_values: int) -> dict[int, np.ndarray]:
        """Return the values by key, with offsets added to both."""
        if not len(self.keys):
            return {}
        parts = np.split(self.values + shift_values, self.starts[1:-1])
        return dict(zip((self.keys + shift_keys).tolist(), parts, strict=True))


@dataclass(frozen=True, slots=True)
class GraphColumns:
    """Nodes, subgraphs and requests of one `submit_many`, numbered from 0.

    Attributes:
      kind: type of each node.
      request: request of each node.
      sub: subgraph of each node. A request's subgraphs are consecutive, in the order of their first nodes.
      inputs: [fan_in, nodes], nodes that each node reads; `NO_NODE` is the initial state.
      waits: number of each node's inputs in the same subgraph.
      consumer: node of the same subgraph that reads each node, or `NONE` or `MANY`.
      consumers: for `MANY`, one entry for each input that reads the node.
      uses: number of inputs that read each node, plus one if it is returned.
      returned: index of each node in its request's result, or -1.
      stop: emitted value that ends each node's chain, or `NO_STOP`.
      chain_end: one more than the last node of each node's chain, for chains that may end early.
      sub_request: request of each subgraph.
      sub_kind: type of each subgraph.
      sub_num_nodes: nodes of each subgraph.
      sub_last: last node of each subgraph.
      is_irregular: whether a subgraph is not a chain of consecutive nodes, each read only by the next.
      sub_waits: number of subgraphs that each subgraph reads.
      sub_consumer, sub_consumers: subgraphs that read each subgraph, in the form of `consumer`.
      first, firsts: nodes of each subgraph that read no node of it, in the form of `consumer`.
      request_nodes, request_subs: one more than the last node, and subgraph, of each request.
      num_returned: number of states that each request returns.
      rows: [requests, kinds of state], upper bound of the state rows that each request needs.
    """

    kind: np.ndarray
    request: np.ndarray
    sub: np.ndarray
    inputs: np.ndarray
    waits: np.ndarray
    consumer: np.ndarray
    consumers: Several
    uses: np.ndarray
    returned: np.ndarray
    stop: np.ndarray
    chain_end: np.ndarray
    sub_request: np.ndarray
    sub_kind: np.ndarray
    sub_num_nodes: np.ndarray
    sub_last: np.ndarray
    is_irregular: np.ndarray
    sub_waits: np.ndarray
    sub_consumer: np.ndarray
    sub_consumers: Several
    first: np.ndarray
    firsts: Several
    request_nodes: np.ndarray
    request_subs: np.ndarray
    num_returned: np.ndarray
    rows: np.ndarray
