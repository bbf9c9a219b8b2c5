"""The load that one GPU serves: its greatest rate within a latency target, and a rate to begin with.

Owns: the target, the search, and how long a load is watched.
Does not know: the server, except for the figures of a load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pensieve_lab.simulation.part import Part, Sampler
from pensieve_lab.workload import Session

USUAL_SHARE = 0.7
"""Share of what a GPU serves without state that conversations need at the default rate."""
_AT_ONCE_PER_S = 1000.0
_MIN_ARRIVALS = 10
_STEP = 4.0  # factor of the rate until a load is found on the other side of the target

type Figures = Mapping[str, Any]
"""Figures of a run by the names of `pensieve_lab.simulator.figures`."""


@dataclass(frozen=True)
class Target:
    """Latencies that a load must keep.

    Attributes:
      level_ms: most ms/token, mean from arrival to the last token.
      first_token_ms: most ms to the first token, mean; None for no limit.
    """

    level_ms: float
    first_token_ms: float | None = None

    def holds(self, figures: Figures) -> bool:
        """Return whether a run kept the target; a run without an answer did not."""
        latency, first = figures["normalized_latency_s"], figures["first_token_s"]
        if latency is None or first is None:
            return False
        is_soon = self.first_token_ms is None or 1e3 * first["mean"] <= self.first_token_ms
        return bool(1e3 * latency["mean"] <= self.level_ms and is_soon)

    def __str__(self) -> str:
        first = "" if self.first_token_ms is None else f" and {self.first_token_ms:g} ms to the first token"
        return f"{self.level_ms:g} ms/token{first} on average"


class Load(NamedTuple):
    """Conversations that begin at a rate, and when the run is measured.

    Attributes:
      sessions: in order of arrival.
      warm_up_s: time before the measured window.
      window_s: length of the window.
    """

    sessions: Sequence[Session]
    warm_up_s: float
    window_s: float


def load_at(sampler: Sampler, part: Part, rate_per_s: float) -> Load:
    """Begin the part's conversations at a rate, again and again, for twice as long as one lasts.

    The second half is measured: conversations of all ages are under way in it. It has ten arrivals at least.
    """
    sessions = part.sessions
    life_s = sum(sum(one.think_s) for one in sessions) / len(sessions)
    half_s = max(life_s, _MIN_ARRIVALS / rate_per_s)
    conversations = tuple(one.conversation for one in sessions)
    small = replace(sampler, trace=replace(sampler.trace, conversations=conversations))
    return Load(small.sessions(rate_per_s, 2 * half_s), half_s, half_s)


def greatest_rate(
    figures_at: Callable[[float], Figures], target: Target, start_per_s: float, num_tries: int
) -> tuple[float, Figures] | None:
    """Find the greatest rate whose load keeps the target, and its figures; None if no tried rate does.

    The rate is changed by a factor of four until the target lies between two loads, then bisected.
    """
    in_time, too_much = 0.0, math.inf
    best: tuple[float, Figures] | None = None
    tried = start_per_s
    for _ in range(num_tries):
        found = figures_at(tried)
        if target.holds(found):
            in_time, best = tried, (tried, found)
        else:
            too_much = tried
        lower, upper = in_time or too_much / _STEP**2, min(too_much, tried * _STEP**2)
        tried = math.sqrt(lower * upper)
    return best


def usual_rate(sampler: Sampler, share: float, busy_s: Callable[[Sequence[Session]], float]) -> float:
    """Return the rate at which conversations need `USUAL_SHARE` of a GPU that serves them without state.

    `busy_s` returns the GPU seconds of sessions. The first estimate comes from conversations that begin at
    once, in large batches; a second one from the rate that follows.
    """
    rate_per_s = _AT_ONCE_PER_S
    for _ in range(2):
        part = sampler.part(share, rate_per_s)
        rate_per_s = USUAL_SHARE * sampler.time_scale * len(part.sessions) / max(busy_s(part.sessions), 1e-9)
    return rate_per_s
