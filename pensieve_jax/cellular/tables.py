"""What is known of every node, subgraph and request, as columns of arrays.

Owns: the columns, room in them, and how the parts of one `submit_many` come in and go.
Does not know: what the values mean to anybody.

A Python object for each node would cost more than its cell: a cell of 512 rows takes a GPU 30 to 200
microseconds. Ids are indices. Those of one `submit_many` follow one another and are given back together, when
its last request has ended; room is given in powers of two, so that nothing moves and nothing is searched for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.parts import MANY, GraphColumns
from pensieve_jax.cellular.pieces import NO_NODE

WAITING, SUBMITTED, COMPLETED, DROPPED = range(4)
"""Of a node."""
NOWHERE = -1
"""In place of what a request came with, once it has gone."""
INITIAL = 0
"""The node whose state is the initial one, which nobody computes."""


class Room:
    """Columns of one length, in which ranges are taken and given back."""

    def __init__(self, first: int = 0) -> None:
        """Args: first: index of the first that may be taken."""
        self._end = first
        self._free: dict[int, list[int]] = {}
        self._fills: dict[str, int] = {}
        self.capacity = 0

    def column(self, name: str, dtype: type, fill: int, *, rows: int | None = None) -> None:
        """Add one; `rows` makes it two-dimensional, with indices last."""
        shape = (self.capacity,) if rows is None else (rows, self.capacity)
        self._fills[name] = fill
        setattr(self, name, np.full(shape, fill, dtype))

    def take(self, num: int) -> int:
        """The first of `num` indices that nobody has."""
        size = _size(num)
        free = self._free.get(size)
        if free:
            return free.pop()
        start, self._end = self._end, self._end + size
        if self._end > self.capacity:
            self._grow(max(2 * self.capacity, self._end, 1024))
        return start

    def give(self, start: int, num: int) -> None:
        """Nobody has these any more."""
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
    """Each once, in the order of their last places, without sorting; `mark` is a column of no meaning."""
    places = np.arange(len(ids))
    mark[ids] = places
    return ids[mark[ids] == places]


def all_values(ids: np.ndarray, only: np.ndarray, several: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the values of `ids` in columns of `GraphColumns`, in order; `NONE` for an id without one."""
    values = only[ids]
    if not (values == MANY).any():
        return values
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return np.concatenate([several[key] if one == MANY else np.array([one]) for key, one in pairs])


def _forget(several: dict[int, np.ndarray], only: np.ndarray, start: int, num: int) -> None:
    """Several values are kept of none of these any more; `only` says of which they are."""
    if several:
        for key in (start + (only[start : start + num] == MANY).nonzero()[0]).tolist():
            del several[key]


class Nodes(Room):
    """A column for each thing that is known of nodes; see `GraphColumns`.

    Attributes:
      state: `WAITING`, `SUBMITTED`, `COMPLETED` or `DROPPED`.
      waits: inputs of its own subgraph that have not been submitted.
      uses: inputs that read it and were not submitted, and one if it is returned and was not read.
      row: where its state is.
      worker: on whose device; -1 before it was submitted.
      emitted: [fields, nodes], 32 bits each.
      immediates: [places, nodes].
      mark: of no meaning; a place to tell doubles by.
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
        """Only the initial state, in the row behind all others of every device."""
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
        self.take(1)
        self.row[INITIAL], self.worker[INITIAL], self.sub[INITIAL] = num_rows, -1, -1

    def fill(
        self,
        start: int,
        parts: GraphColumns,
        immediates: Sequence[Sequence[np.ndarray]],
        sub: int,
        request: int,
    ) -> None:
        """Put these from `start` on, with ids of subgraphs and requests from `sub` and `request` on."""
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
        """None of these nodes, which are all of a request, has run."""
        here = slice(start, end)
        inputs = self.inputs[:, here]
        self.waits[here] = ((self.sub[inputs] == self.sub[here]) & (inputs != INITIAL)).sum(axis=0)
        read = inputs[inputs != INITIAL] - start
        self.uses[here] = np.bincount(read, minlength=end - start) + (self.returned[here] >= 0)
        self.state[here], self.row[here], self.worker[here] = WAITING, -1, -1

    def clear(self, start: int, num: int) -> None:
        """Nobody has these any more."""
        _forget(self.consumers, self.consumer, start, num)
        self.give(start, num)


class Subgraphs(Room):
    """A column for each thing that is known of subgraphs; see `GraphColumns`.

    Attributes:
      waits: subgraphs that it reads and that have not completed.
      unsubmitted: nodes that were neither submitted nor dropped.
      in_flight: nodes that were submitted and have not completed.
      pinned: the worker on which it has nodes in flight; -1 for none.
      seq: its place in the order in which subgraphs were released; -1 before.
      last: its last node.
      num_bent: of each type, subgraphs that are released, not done, and no chains; see `GraphColumns`.
      waste: nodes in flight whose results nobody wants any more.
      is_done: whether nothing of it is still to come.
      has_released: whether those that read it know.
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
    is_bent: np.ndarray
    mark: np.ndarray

    def __init__(self, num_types: int) -> None:
        super().__init__()
        self.num_bent = np.zeros(num_types, np.int64)
        self.column("is_bent", np.bool_, 0)
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
        """Put these from `start` on, with ids of nodes and requests from `node` and `request` on."""
        here = slice(start, start + len(parts.sub_kind))
        self.kind[here], self.request[here] = parts.sub_kind, parts.sub_request + request
        self.waits[here], self.unsubmitted[here] = parts.sub_waits, parts.sub_num_nodes
        self.consumer[here] = np.where(parts.sub_consumer < 0, parts.sub_consumer, parts.sub_consumer + start)
        self.consumers.update(parts.sub_consumers.items(start, start))
        self.first[here] = np.where(parts.first < 0, parts.first, parts.first + node)
        self.firsts.update(parts.firsts.items(start, node))
        self.last[here], self.is_bent[here] = parts.sub_last + node, parts.is_bent
        self.in_flight[here], self.waste[here] = 0, 0
        self.is_done[here], self.has_released[here] = False, False
        self.pinned[here], self.seq[here] = -1, -1

    def begin_bent(self, subs: np.ndarray) -> None:
        """These are released: those that are bent count among their types' until they are done."""
        bent = subs[self.is_bent[subs]]
        if len(bent):
            np.add.at(self.num_bent, self.kind[bent], 1)

    def end(self, subs: np.ndarray) -> None:
        """These are done, which were not."""
        self.is_done[subs] = True
        bent = subs[self.is_bent[subs] & (self.seq[subs] >= 0)]
        if len(bent):
            np.subtract.at(self.num_bent, self.kind[bent], 1)

    def reset(self, subs: np.ndarray, nodes: Nodes, start: int, end: int) -> None:
        """None of these, which are all of a request with nodes from `start` to `end`, has run."""
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
        """Nobody has these any more."""
        _forget(self.consumers, self.consumer, start, num)
        _forget(self.firsts, self.first, start, num)
        self.give(start, num)


class Requests(Room):
    """A column for each thing that is known of requests.

    Attributes:
      start, end: its nodes.
      sub_start, sub_end: its subgraphs.
      arrival: what it came with, or `NOWHERE`.
      serial: its number among all that ever came.
      num_ever: how many ever came.
      subs_left: subgraphs that are not done.
      rows: [kinds, requests] that it may hold.
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
        """Put these from `start` on, with ids of nodes and subgraphs from `node` and `sub` on."""
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
    """What came with one `submit_many`, and goes when all of it has ended.

    Attributes:
      node, num_nodes, sub, num_subs, first, num: its room in the other tables, `first` that of requests.
      num_left: requests of it that have not gone.
    """

    num_left: np.ndarray
    _NAMES = ("node", "num_nodes", "sub", "num_subs", "first", "num", "num_left")

    def __init__(self) -> None:
        super().__init__()
        for name in self._NAMES:
            self.column(name, np.int64, 0)

    def enter(self, **values: int) -> int:
        """Put these into columns of their names; returns where."""
        place = self.take(1)
        for name, value in values.items():
            getattr(self, name)[place] = value
        return place

    def leave(self, place: int) -> dict[str, int]:
        """What was put there, which is there no more."""
        self.give(place, 1)
        return {name: int(getattr(self, name)[place]) for name in self._NAMES}


class Tables:
    """All four.

    Attributes:
      nodes, subgraphs, requests, arrivals: see their classes.
    """

    def __init__(self, types: CellTypes, num_rows: int) -> None:
        self.nodes = Nodes(types, num_rows)
        self.subgraphs = Subgraphs(len(types.types))
        self.requests, self.arrivals = Requests(len(types.kinds)), Arrivals()
