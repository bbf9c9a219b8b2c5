"""Tables of all nodes, subgraphs and requests, stored as columns of arrays.

Owns: the columns, the allocation of index ranges, and adding and removing the data of one `submit_many`.
Does not know: how other modules use the values.

A Python object per node would cost more than its cell: a cell of 512 rows takes a GPU 30 to 200 microseconds.
Ids are indices. The ids of one `submit_many` are consecutive, and are freed together when its last request
has finished. Ranges are allocated in powers of two, so allocation neither moves data nor searches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.graph_batch import NO_NODE
from pensieve_jax.cellular.graph_columns import MANY, GraphColumns

WAITING, SUBMITTED, COMPLETED, DROPPED = range(4)
"""States of a node."""
NOWHERE = -1
"""Value of `Requests.arrival` for a free index."""
INITIAL = 0
"""Node that stands for the initial state. It is never computed."""


class Room:
    """Columns of equal length, with an allocator of index ranges."""

    def __init__(self, first: int = 0) -> None:
        """Start without columns; `first` is the first index that may be allocated."""
        self._end = first
        self._free: dict[int, list[int]] = {}
        self._fills: dict[str, int] = {}
        self.capacity = 0

    def column(self, name: str, dtype: type, fill: int, *, rows: int | None = None) -> None:
        """Add a column; `rows` makes it two-dimensional, with indices last."""
        shape = (self.capacity,) if rows is None else (rows, self.capacity)
        self._fills[name] = fill
        setattr(self, name, np.full(shape, fill, dtype))

    def allocate(self, num: int) -> int:
        """Allocate `num` consecutive indices; return the first."""
        size = _size(num)
        free = self._free.get(size)
        if free:
            return free.pop()
        start, self._end = self._end, self._end + size
        if self._end > self.capacity:
            self._grow(max(2 * self.capacity, self._end, 1024))
        return start

    def free(self, start: int, num: int) -> None:
        """Free a range of indices."""
        self._free.setdefault(_size(num), []).append(start)

    def _grow(self, capacity: int) -> None:
        for name, fill in self._fills.items():
            column = getattr(self, name)
            grown = np.full((*column.shape[:-1], capacity), fill, column.dtype)
            grown[..., : self.capacity] = column
            setattr(self, name, grown)
        self.capacity = capacity


def _size(num: int) -> int:
    return 1 << (num - 1).bit_length()


def distinct(ids: np.ndarray, mark: np.ndarray) -> np.ndarray:
    """Return the distinct ids, ordered by their last occurrence, without sorting; `mark` is scratch space."""
    places = np.arange(len(ids))
    mark[ids] = places
    return ids[mark[ids] == places]


def all_values(ids: np.ndarray, only: np.ndarray, several: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the values of `ids` in a column of `GraphColumns`, in order; ids without a value give `NONE`."""
    values = only[ids]
    if not (values == MANY).any():
        return values
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return np.concatenate([several[key] if one == MANY else np.array([one]) for key, one in pairs])


def _forget(several: dict[int, np.ndarray], only: np.ndarray, start: int, num: int) -> None:
    """Remove the entries of a range of ids from `several`; `only` tells which ids have an entry."""
    if several:
        for key in (start + (only[start : start + num] == MANY).nonzero()[0]).tolist():
            del several[key]


class Nodes(Room):
    """Columns of nodes. For columns that are not listed, see `GraphColumns`.

    Attributes:
      state: `WAITING`, `SUBMITTED`, `COMPLETED` or `DROPPED`.
      waits: inputs in its own subgraph that have not been submitted.
      uses: unsubmitted inputs that read it, plus one if it is returned and has not been read.
      row: row of its state; -1 for none.
      worker: worker that has the row; -1 before submission.
      emitted: [fields, nodes], 32 bits each.
      immediates: [immediates, nodes].
      mark: scratch space of `distinct`.
    """

    kind: np.ndarray
    request: np.ndarray
    sub: np.ndarray
    state: np.ndarray
    waits: np.ndarray
    uses: np.ndarray
    inputs: np.ndarray
    consumer: np.ndarray
    returned: np.ndarray
    stop: np.ndarray
    chain_end: np.ndarray
    row: np.ndarray
    worker: np.ndarray
    mark: np.ndarray
    immediates: np.ndarray
    emitted: np.ndarray

    def __init__(self, types: CellTypes, num_rows: int) -> None:
        """Start with the initial state only, in row `num_rows`, the last of every device."""
        super().__init__()
        for name, dtype in (
            *(("kind", np.int16), ("request", np.int64), ("sub", np.int64), ("state", np.int8)),
            *(("waits", np.int32), ("uses", np.int32), ("consumer", np.int64), ("returned", np.int32)),
            *(("stop", np.int64), ("chain_end", np.int64), ("mark", np.int32)),
        ):
            self.column(name, dtype, 0)
        self.column("row", np.int32, -1)
        self.column("worker", np.int16, -1)
        self.column("inputs", np.int64, 0, rows=max(types.max_fan_in, 1))
        self.column("immediates", np.int32, 0, rows=types.max_num_immediates)
        self.column("emitted", np.int32, 0, rows=types.max_num_emitted)
        self.consumers: dict[int, np.ndarray] = {}
        self.allocate(1)
        self.row[INITIAL], self.worker[INITIAL], self.sub[INITIAL] = num_rows, -1, -1

    def fill(
        self,
        start: int,
        parts: GraphColumns,
        immediates: Sequence[Sequence[np.ndarray]],
        sub: int,
        request: int,
    ) -> None:
        """Store nodes from index `start`; their subgraphs and requests begin at `sub` and `request`."""
        here = slice(start, start + len(parts.kind))
        self.kind[here], self.returned[here], self.stop[here] = parts.kind, parts.returned, parts.stop
        self.request[here], self.sub[here] = parts.request + request, parts.sub + sub
        self.inputs[:, here] = np.where(parts.inputs == NO_NODE, INITIAL, parts.inputs + start)
        self.chain_end[here] = parts.chain_end + start
        self.consumer[here] = np.where(parts.consumer < 0, parts.consumer, parts.consumer + start)
        self.consumers.update(parts.consumers.items(start, start))
        for place, values in enumerate(immediates):
            np.concatenate(values, out=self.immediates[place, here])
        self.waits[here] = parts.waits
        self.uses[here] = parts.uses
        self.state[here], self.row[here], self.worker[here] = WAITING, -1, -1

    def reset(self, start: int, end: int) -> None:
        """Reset all nodes of a request, as if none had run."""
        here = slice(start, end)
        inputs = self.inputs[:, here]
        self.waits[here] = ((self.sub[inputs] == self.sub[here]) & (inputs != INITIAL)).sum(axis=0)
        read = inputs[inputs != INITIAL] - start
        self.uses[here] = np.bincount(read, minlength=end - start) + (self.returned[here] >= 0)
        self.state[here], self.row[here], self.worker[here] = WAITING, -1, -1

    def clear(self, start: int, num: int) -> None:
        """Free a range of nodes, with its entries in `consumers`."""
        _forget(self.consumers, self.consumer, start, num)
        self.free(start, num)


class Subgraphs(Room):
    """Columns of subgraphs. For columns that are not listed, see `GraphColumns`.

    Attributes:
      waits: incomplete subgraphs that it reads.
      unsubmitted: nodes that were neither submitted nor dropped.
      in_flight: nodes that were submitted and have not completed.
      pinned: worker on which it has nodes in flight; -1 for none.
      seq: number in the order of release; -1 before.
      last: last node.
      num_irregular: for each type, released unfinished subgraphs with `is_irregular`; see `GraphColumns`.
      waste: nodes in flight that were dropped.
      is_done: whether all its nodes have completed or were dropped.
      has_released: whether the subgraphs that read it were notified.
    """

    request: np.ndarray
    kind: np.ndarray
    waits: np.ndarray
    unsubmitted: np.ndarray
    in_flight: np.ndarray
    waste: np.ndarray
    is_done: np.ndarray
    has_released: np.ndarray
    pinned: np.ndarray
    seq: np.ndarray
    consumer: np.ndarray
    first: np.ndarray
    last: np.ndarray
    is_irregular: np.ndarray
    mark: np.ndarray

    def __init__(self, num_types: int) -> None:
        super().__init__()
        self.num_irregular = np.zeros(num_types, np.int64)
        self.column("is_irregular", np.bool_, 0)
        for name in (
            "request",
            "waits",
            "unsubmitted",
            "in_flight",
            "waste",
            "seq",
            "consumer",
            "first",
            "last",
            "mark",
        ):
            self.column(name, np.int64, 0)
        self.column("kind", np.int16, 0)
        self.column("pinned", np.int16, -1)
        self.column("is_done", np.bool_, 0)
        self.column("has_released", np.bool_, 0)
        self.consumers: dict[int, np.ndarray] = {}
        self.firsts: dict[int, np.ndarray] = {}

    def fill(self, start: int, parts: GraphColumns, node: int, request: int) -> None:
        """Store subgraphs from index `start`; their nodes and requests begin at `node` and `request`."""
        here = slice(start, start + len(parts.sub_kind))
        self.kind[here], self.request[here] = parts.sub_kind, parts.sub_request + request
        self.waits[here], self.unsubmitted[here] = parts.sub_waits, parts.sub_num_nodes
        self.consumer[here] = np.where(parts.sub_consumer < 0, parts.sub_consumer, parts.sub_consumer + start)
        self.consumers.update(parts.sub_consumers.items(start, start))
        self.first[here] = np.where(parts.first < 0, parts.first, parts.first + node)
        self.firsts.update(parts.firsts.items(start, node))
        self.last[here], self.is_irregular[here] = parts.sub_last + node, parts.is_irregular
        self.in_flight[here], self.waste[here] = 0, 0
        self.is_done[here], self.has_released[here] = False, False
        self.pinned[here], self.seq[here] = -1, -1

    def begin_irregular(self, subs: np.ndarray) -> None:
        """Count released subgraphs with `is_irregular` in `num_irregular`."""
        irregular = subs[self.is_irregular[subs]]
        if len(irregular):
            np.add.at(self.num_irregular, self.kind[irregular], 1)

    def end(self, subs: np.ndarray) -> None:
        """Mark unfinished subgraphs as done."""
        self.is_done[subs] = True
        irregular = subs[self.is_irregular[subs] & (self.seq[subs] >= 0)]
        if len(irregular):
            np.subtract.at(self.num_irregular, self.kind[irregular], 1)

    def reset(self, subs: np.ndarray, nodes: Nodes, start: int, end: int) -> None:
        """Reset all subgraphs of a request, whose nodes are `start` to `end`, as if none had run."""
        first = subs[0]
        inputs, own = nodes.inputs[:, start:end], nodes.sub[start:end]
        sources = nodes.sub[inputs]
        is_outer = (sources != own) & (inputs != INITIAL)
        pairs = np.unique(np.stack([sources[is_outer], np.broadcast_to(own, inputs.shape)[is_outer]]), axis=1)
        self.waits[subs] = np.bincount(pairs[1] - first, minlength=len(subs))
        self.unsubmitted[subs] = np.bincount(own - first, minlength=len(subs))
        self.in_flight[subs], self.waste[subs] = 0, 0
        self.is_done[subs], self.has_released[subs] = False, False
        self.pinned[subs], self.seq[subs] = -1, -1

    def clear(self, start: int, num: int) -> None:
        """Free a range of subgraphs, with its entries in `consumers` and `firsts`."""
        _forget(self.consumers, self.consumer, start, num)
        _forget(self.firsts, self.first, start, num)
        self.free(start, num)


class Requests(Room):
    """Columns of requests.

    Attributes:
      start, end: range of its nodes.
      sub_start, sub_end: range of its subgraphs.
      arrival: index of its `submit_many` in `Arrivals`, or `NOWHERE`.
      serial: number of the request since the start.
      num_ever: number of requests since the start.
      subs_left: unfinished subgraphs.
      rows: [kinds, requests], rows that it may hold.
    """

    start: np.ndarray
    end: np.ndarray
    sub_start: np.ndarray
    sub_end: np.ndarray
    serial: np.ndarray
    arrival: np.ndarray
    subs_left: np.ndarray
    mark: np.ndarray
    rows: np.ndarray

    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        for name in ("start", "end", "sub_start", "sub_end", "serial", "subs_left", "mark"):
            self.column(name, np.int64, 0)
        self.column("arrival", np.int64, NOWHERE)
        self.column("rows", np.int64, 0, rows=num_kinds)
        self.num_ever = 0

    def fill(self, start: int, parts: GraphColumns, node: int, sub: int) -> None:
        """Store requests from index `start`; their nodes and subgraphs begin at `node` and `sub`."""
        here = slice(start, start + len(parts.request_nodes))
        self.end[here], self.sub_end[here] = parts.request_nodes + node, parts.request_subs + sub
        self.start[here] = np.concatenate([[0], parts.request_nodes[:-1]]) + node
        self.sub_start[here] = np.concatenate([[0], parts.request_subs[:-1]]) + sub
        self.subs_left[here] = self.sub_end[here] - self.sub_start[here]
        self.rows[:, here] = parts.rows.T
        num = len(parts.request_nodes)
        self.serial[here] = np.arange(self.num_ever, self.num_ever + num)
        self.num_ever += num


class Arrivals(Room):
    """Columns of `submit_many` calls. A call is removed when all its requests have left.

    Attributes:
      node, num_nodes, sub, num_subs, first, num: its ranges of nodes, subgraphs and requests.
      num_left: requests that have not left.
    """

    num_left: np.ndarray
    _NAMES = ("node", "num_nodes", "sub", "num_subs", "first", "num", "num_left")

    def __init__(self) -> None:
        super().__init__()
        for name in self._NAMES:
            self.column(name, np.int64, 0)

    def enter(self, **values: int) -> int:
        """Store values in the columns of their names; return the index."""
        place = self.allocate(1)
        for name, value in values.items():
            getattr(self, name)[place] = value
        return place

    def leave(self, place: int) -> dict[str, int]:
        """Free an index; return its values by column."""
        self.free(place, 1)
        return {name: int(getattr(self, name)[place]) for name in self._NAMES}


class Tables:
    """Tables of nodes, subgraphs, requests and arrivals of one engine."""

    def __init__(self, types: CellTypes, num_rows: int) -> None:
        self.nodes = Nodes(types, num_rows)
        self.subgraphs = Subgraphs(len(types.types))
        self.requests, self.arrivals = Requests(len(types.kinds)), Arrivals()
