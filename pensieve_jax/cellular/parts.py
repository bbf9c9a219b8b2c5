"""What follows from the graphs of requests, as columns: nodes, subgraphs and requests by number.

Owns: the columns' names and what stands for none and for several.
Does not know: how they are found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NONE, MANY = -1, -2
"""In place of the id of a node or subgraph where there is none, and where there are several."""
NO_STOP = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Several:
    """Values of keys that have several of them, and `MANY` in the column that holds the others' only one.

    Attributes:
      keys: sorted.
      starts: of each key's values; one more than keys.
      values: of all keys.
    """

    keys: np.ndarray
    starts: np.ndarray
    values: np.ndarray

    def items(self, shift_keys: int, shift_values: int) -> dict[int, np.ndarray]:
        """Values by key, both moved."""
        if not len(self.keys):
            return {}
        parts = np.split(self.values + shift_values, self.starts[1:-1])
        return dict(zip((self.keys + shift_keys).tolist(), parts, strict=True))


@dataclass(frozen=True, slots=True)
class GraphColumns:
    """Nodes, subgraphs and requests of one `submit_many`, numbered from 0.

    Attributes:
      kind: type, by node.
      request: by node.
      sub: subgraph, by node; a request's follow one another, in the order of their first nodes.
      inputs: [fan_in, nodes], `NO_NODE` for the initial state.
      waits: inputs that are nodes of the same subgraph.
      consumer: the node of the same subgraph that reads it, `NONE` or `MANY`.
      consumers: where `MANY`, an entry for each input that reads it.
      uses: inputs that read it, and one if it is returned.
      returned: place among what its request returns, or -1.
      stop: the value that ends its chain, or `NO_STOP`.
      chain_end: one more than the last node of a chain that may end early.
      sub_request: by subgraph.
      sub_kind: by subgraph.
      sub_num_nodes: by subgraph.
      sub_last: its last node.
      is_bent: of subgraphs that are no chains of nodes that follow one another, each read by the next alone.
      sub_waits: subgraphs that it reads, by subgraph.
      sub_consumer, sub_consumers: subgraphs that read it, as of nodes.
      first, firsts: nodes that need nothing of their own subgraph, as consumers.
      request_nodes, request_subs: one more than the last of each request.
      num_returned: by request.
      rows: [requests, kinds of state], how many are needed at most.
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
    is_bent: np.ndarray
    sub_waits: np.ndarray
    sub_consumer: np.ndarray
    sub_consumers: Several
    first: np.ndarray
    firsts: Several
    request_nodes: np.ndarray
    request_subs: np.ndarray
    num_returned: np.ndarray
    rows: np.ndarray
