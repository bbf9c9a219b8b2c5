"""One load point: a client drives a server, and what was seen of it.

Owns: what is done between steps, which part of a run counts, and when it ends.
Does not know: what serves (`Server` is a protocol), what figures are made of a run (`figures`).

The server runs in the calling thread. What was sent is handed to it between steps, as a front end would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pensieve_lab.serving.client import Lag, ServingClient
from pensieve_lab.serving.clock import RunClock
from pensieve_lab.workload import Answer, Server, Steps, UserTurn, add_steps

# What is due at the very end of the window is handed over by then: ten times the lag that makes a run void.
_LATE_S = 0.1


class System(Protocol):
    """What is measured: a model that is loaded once, and served from the start at every load point.

    Attributes:
      label: its name in reports.
    """

    label: str

    def start(self, clock: RunClock) -> Server:
        """A server that knows no conversations; the one before is given up, with what it was doing."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a report says of it: configuration, versions."""
        ...

    def device_name(self) -> str:
        """The kind of its device."""
        ...

    def close(self) -> None:
        """Give up the server."""
        ...


class Window(NamedTuple):
    """Which part of a run counts: requests that arrive from `start_s` to `end_s`.

    After `end_s` users go on, so that its last requests meet the same load, for at most `drain_s`.
    """

    start_s: float = 0.0
    end_s: float = math.inf
    drain_s: float = math.inf

    def has(self, time_s: float) -> bool:
        """`time_s` is within."""
        return self.start_s <= time_s < self.end_s


class Reading(NamedTuple):
    """A server's counters at one time."""

    counters: Mapping[str, float]
    steps: Steps


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was seen.

    Attributes:
      window: what counts of it.
      answers: all, in the order of their ends.
      unfinished: requests that arrived in the window and were not answered.
      num_refused: sessions that ended early because they had outgrown the context.
      lags: of all turns.
      counters, steps: how they changed within the window.
      end_s: when it was over.
    """

    window: Window
    answers: Sequence[Answer]
    unfinished: Sequence[UserTurn]
    num_refused: int
    lags: Sequence[Lag]
    counters: Mapping[str, float]
    steps: Steps
    end_s: float

    @property
    def unfinished_s(self) -> list[float]:
        """How long each unanswered request of the window had waited when the run ended."""
        return [self.end_s - turn.arrival_s for turn in self.unfinished]

    @property
    def num_unfinished(self) -> int:
        """Requests that arrived in the window and were not answered."""
        return len(self.unfinished)


def serve(
    server: Server,
    client: ServingClient,
    clock: RunClock,
    window: Window,
    on_answer: Callable[[Answer], None] = lambda _: None,
    between_steps: Callable[[], None] = lambda: None,
    afterwards: Callable[[Callable[[], bool]], None] = lambda _: None,
) -> Run:
    """Start the clock, and serve until all of the window is answered, or for as long as that may take.

    `afterwards` is called when all of the run has been seen and the users are still there, with a function
    that lets it go on by a step, or until somebody sends something; that answers False when nobody will.

    Raises PensieveError for a turn that failed, and whatever `between_steps` raises, which is called at least
    once a second while there is nothing to do.
    """
    readings: list[Reading] = []
    edges_s = (window.start_s, window.end_s)
    loop = _Loop(server, client, clock, window, on_answer)
    clock.start()
    with client:
        while True:
            between_steps()
            now_s = clock.now()
            while len(readings) < len(edges_s) and now_s >= edges_s[len(readings)]:
                readings.append(_read(server))
            drain_s = window.drain_s if loop.unanswered else min(_LATE_S, window.drain_s)
            if now_s >= window.end_s + drain_s or not loop.go_on():
                break
        end_s = clock.now()
        while len(readings) < len(edges_s):
            readings.append(_read(server))
        before, after = readings
        seen = Run(
            window=window,
            answers=list(loop.answers),
            unfinished=list(loop.unanswered.values()),
            num_refused=client.num_refused,
            lags=list(client.lags),
            counters={name: after.counters[name] - before.counters[name] for name in after.counters},
            steps=add_steps(after.steps, before.steps, -1),
            end_s=end_s,
        )
        afterwards(loop.go_on)
    return seen


class _Loop:
    """A server and its users, turn by turn.

    Attributes:
      answers: all, in the order of their ends.
      unanswered: requests of the window without an answer.
    """

    def __init__(
        self,
        server: Server,
        client: ServingClient,
        clock: RunClock,
        window: Window,
        on_answer: Callable[[Answer], None],
    ) -> None:
        self.answers: list[Answer] = []
        self.unanswered: dict[tuple[str, int], UserTurn] = {}
        self._server, self._client, self._clock = server, client, clock
        self._window, self._on_answer = window, on_answer

    def go_on(self) -> bool:
        """A step, or a wait for whoever sends something next; False when nobody will."""
        for turn in self._client.take():
            self._server.submit(turn)
            if self._window.has(turn.arrival_s):
                self.unanswered[turn.conversation_id, turn.turn_index] = turn
        if self._server.has_unfinished:
            for answer in self._server.step(math.inf):
                self._client.answer(answer)
                self.answers.append(answer)
                self.unanswered.pop((answer.turn.conversation_id, answer.turn.turn_index), None)
                self._on_answer(answer)
        elif self._client.done:
            return False
        else:
            self._client.wait(_next_edge_s(self._clock.now(), self._window))
        return True


def _read(server: Server) -> Reading:
    return Reading(dict(server.counters()), dict(server.steps()))


def _next_edge_s(now_s: float, window: Window) -> float:
    """When an idle loop must look again, though nothing was sent."""
    edges_s = (window.start_s, window.end_s, window.end_s + min(_LATE_S, window.drain_s))
    return min((edge_s for edge_s in edges_s if edge_s > now_s), default=math.inf)
