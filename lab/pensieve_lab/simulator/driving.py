"""The order of virtual time: users, servers, and what happens to servers.

Owns: what happens next.
Does not know: how turns are routed, how a server serves, or what is reported.

A server takes the turns that were sent by the time at which its loop comes round. The one that is furthest
behind goes first, so a turn meets every server as it is when the turn is sent, give or take a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from pensieve_lab.workload.client import Client
from pensieve_lab.workload.server import Server
from pensieve_lab.workload.turns import Answer, UserTurn


class EventQueue:
    """What happens to servers, by its times."""

    def __init__(self) -> None:
        """Nothing will."""
        self._due: list[tuple[float, int, Callable[[], Iterable[int]]]] = []
        self._num_added = 0

    def add(self, at_s: float, happen: Callable[[], Iterable[int]]) -> None:
        """At a time; `happen` returns the indices of the servers that were given turns."""
        self._num_added += 1
        heapq.heappush(self._due, (at_s, self._num_added, happen))

    @property
    def next_s(self) -> float:
        """When something happens; infinite if nothing does."""
        return self._due[0][0] if self._due else math.inf

    def take(self) -> Callable[[], Iterable[int]]:
        """What happens next."""
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
    """Serve until every turn is answered, or every clock has reached `until_s`; yields answers as they come.

    `send` gives a turn to a server and returns its index; `settle` sees every answer before its user does.
    Servers may be added and exchanged by what is on the agenda. It can be called again, to go on.
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
    """Servers that have something to do, by their clocks, the first of equal ones first."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._heap = [(one.clock.now(), index) for index, one in enumerate(servers) if one.has_unfinished]
        heapq.heapify(self._heap)

    def add(self, index: int) -> None:
        """It may have something to do."""
        if self._servers[index].has_unfinished:
            heapq.heappush(self._heap, (self._servers[index].clock.now(), index))

    def first(self) -> int | None:
        """The index of the one that is furthest behind."""
        heap, servers = self._heap, self._servers
        while heap:
            time_s, index = heap[0]
            if servers[index].has_unfinished and servers[index].clock.now() == time_s:
                return index
            heapq.heappop(heap)  # its time has changed, and it stands here again
        return None

    def pop_and_next_s(self) -> float:
        """Take out the first one, wherever it stands; returns the clock of the next."""
        _, index = self._heap[0]
        while self._heap and self._heap[0][1] == index:
            heapq.heappop(self._heap)
        following = self.first()
        if following is None:
            return math.inf
        return self._servers[following].clock.now()
