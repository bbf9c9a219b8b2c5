"""The order of virtual time: users, servers, and events of servers.

Owns: what happens next.
Does not know: how turns are routed, how a server serves, or what is reported.

A server takes the turns that were sent by the time its loop comes round. The server that is furthest behind
goes first, so each turn meets every server in its state at the time of sending, to within a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from pensieve_lab.workload.client import Client
from pensieve_lab.workload.server import Server
from pensieve_lab.workload.turns import Answer, UserTurn


class EventQueue:
    """Future events of servers, ordered by time."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], Iterable[int]]]] = []
        self._num_added = 0

    def add(self, at_s: float, happen: Callable[[], Iterable[int]]) -> None:
        """Schedule an event; `happen` returns the indices of the servers that it gave turns to."""
        self._num_added += 1
        heapq.heappush(self._due, (at_s, self._num_added, happen))

    @property
    def next_s(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._due[0][0] if self._due else math.inf

    def take(self) -> Callable[[], Iterable[int]]:
        """Remove and return the next event."""
        return heapq.heappop(self._due)[2]


def drive(
    client: Client,
    servers: Sequence[Server],
    send: Callable[[UserTurn], int],
    *,
    until_s: float = math.inf,
    agenda: EventQueue | None = None,
    settle: Callable[[Answer], Answer] = lambda answer: answer,
) -> Iterator[Answer]:
    """Serve until every turn is answered, or every clock has reached `until_s`; yield answers as they come.

    `send` gives a turn to a server and returns its index. `settle` sees every answer before its user does.
    Events of the agenda may add and replace servers. `drive` can be called again to continue.
    """
    agenda = agenda or EventQueue()
    queue = _Queue(servers)
    while True:
        behind = queue.first()
        now_s = math.inf if behind is None else servers[behind].clock.now()
        if min(now_s, client.next_s, agenda.next_s) >= until_s:
            return
        if agenda.next_s <= min(now_s, client.next_s):
            for index in agenda.take()():
                queue.add(index)
        elif client.next_s <= now_s:
            queue.add(send(client.take()))
        else:
            assert behind is not None
            others_s = queue.pop_and_next_s()
            answers = servers[behind].step(min(client.next_s, agenda.next_s, until_s, others_s))
            queue.add(behind)
            for answer in answers:
                settled = settle(answer)
                client.receive(settled)
                yield settled


class _Queue:
    """Servers with work, ordered by clock and then index."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._heap = [(one.clock.now(), index) for index, one in enumerate(servers) if one.has_unfinished]
        heapq.heapify(self._heap)

    def add(self, index: int) -> None:
        """Add a server if it has work."""
        if self._servers[index].has_unfinished:
            heapq.heappush(self._heap, (self._servers[index].clock.now(), index))

    def first(self) -> int | None:
        """Return the index of the server that is furthest behind."""
        heap, servers = self._heap, self._servers
        while heap:
            time_s, index = heap[0]
            if servers[index].has_unfinished and servers[index].clock.now() == time_s:
                return index
            heapq.heappop(heap)  # outdated: its time has changed, and a newer entry exists
        return None

    def pop_and_next_s(self) -> float:
        """Remove all entries of the first server; return the clock of the next."""
        _, index = self._heap[0]
        while self._heap and self._heap[0][1] == index:
            heapq.heappop(self._heap)
        following = self.first()
        if following is None:
            return math.inf
        return self._servers[following].clock.now()
