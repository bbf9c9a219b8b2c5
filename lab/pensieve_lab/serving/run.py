"""One load point: a client drives a server, and the run is recorded.

Owns: what happens between steps, which part of a run counts, and when it ends.
Does not know: which server serves (`Server` is a protocol), or the figures of a run (`figures`).

The server runs in the calling thread. New turns are handed to it between steps, as a front end would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pensieve_lab.serving.client import Lag, ServingClient
from pensieve_lab.serving.clock import RunClock
from pensieve_lab.workload import Answer, Server, Steps, UserTurn, subtract_steps

# The run stays open this long after the window, so that its last turns are handed over: ten times a void lag.
_LATE_S = 0.1


class System(Protocol):
    """Measured system: a model that is loaded once, and a server that starts anew for every load point.

    Attributes:
      label: name in reports.
    """

    label: str

    def start(self, clock: RunClock) -> Server:
        """Start a server without conversations; the previous one is given up with its running turns."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return configuration and versions for a report."""
        ...

    def device_name(self) -> str:
        """Return the kind of its device."""
        ...

    def close(self) -> None:
        """Give up the server."""
        ...


class Window(NamedTuple):
    """Part of a run that counts: requests that arrive from `start_s` to `end_s`.

    After `end_s` users continue for at most `drain_s`, so that the last requests meet the same load.
    """

    start_s: float = 0.0
    end_s: float = math.inf
    drain_s: float = math.inf

    def has(self, time_s: float) -> bool:
        """Return whether `time_s` is within the window."""
        return self.start_s <= time_s < self.end_s


class Reading(NamedTuple):
    """Counters of a server at one time."""

    counters: Mapping[str, float]
    steps: Steps


@dataclass(frozen=True, kw_only=True)
class Run:
    """Record of a run.

    Attributes:
      window: part that counts.
      answers: all answers, in the order of their ends.
      unfinished: unanswered requests that arrived in the window.
      num_refused: sessions that ended early because they had outgrown the context.
      lags: lags of all turns.
      counters, steps: changes within the window.
      end_s: end of the run.
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
        """Times that the unanswered requests of the window had waited at the end of the run."""
        return [self.end_s - turn.arrival_s for turn in self.unfinished]

    @property
    def num_unfinished(self) -> int:
        """Number of unanswered requests that arrived in the window."""
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
    """Start the clock, and serve until the whole window is answered or its drain time is over.

    `afterwards` is called at the end of the run while the users still exist. Its argument is a function that
    continues the run by a step, or until a user sends a turn; it returns False when no turn will come.

    Raises PensieveError for a failed turn, and any error of `between_steps`. That is called at least once a
    second while there is nothing to do.
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
            steps=subtract_steps(after.steps, before.steps),
            end_s=end_s,
        )
        afterwards(loop.go_on)
    return seen


class _Loop:
    """Server and users of a run, turn by turn.

    Attributes:
      answers: all answers, in the order of their ends.
      unanswered: unanswered requests of the window.
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
        """Step, or wait for a user to send a turn; return False when no turn will come."""
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
    """Return when an idle loop must wake up even if no turn was sent."""
    edges_s = (window.start_s, window.end_s, window.end_s + min(_LATE_S, window.drain_s))
    return min((edge_s for edge_s in edges_s if edge_s > now_s), default=math.inf)
