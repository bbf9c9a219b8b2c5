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
_MAX_HALF_S = 100.0  # longer loads would take minutes to simulate
_MAX_STEPS = 12  # until a load is found on the other side of the target
_EDGE = 0.1  # the next rate is at least this share of the interval away from its ends

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

    def used(self, figures: Figures) -> float:
        """Return the share of the target that a run used; it kept the target up to 1.

        A run without an answer used infinitely much.
        """
        latency, first = figures["normalized_latency_s"], figures["first_token_s"]
        if latency is None or first is None:
            return math.inf
        share = 1e3 * latency["mean"] / self.level_ms
        if self.first_token_ms is not None:
            share = max(share, 1e3 * first["mean"] / self.first_token_ms)
        return float(share)

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
    A half takes at most 100 s, unless these arrivals take longer. Where conversations last longer, their
    histories are therefore shorter than in a long run.
    """
    sessions = part.sessions
    life_s = sum(sum(one.think_s) for one in sessions) / len(sessions)
    half_s = max(min(life_s, _MAX_HALF_S), _MIN_ARRIVALS / rate_per_s)
    conversations = tuple(one.conversation for one in sessions)
    small = replace(sampler, trace=replace(sampler.trace, conversations=conversations))
    return Load(small.sessions(rate_per_s, 2 * half_s), half_s, half_s)


class Greatest(NamedTuple):
    """The greatest load that kept a target.

    Attributes:
      rate_per_s: conversations that begin per second.
      figures: figures of this load.
      missed: figures of the least load that missed the target; None if none did.
    """

    rate_per_s: float
    figures: Figures
    missed: Figures | None


def greatest_rate(
    figures_at: Callable[[float], Figures], target: Target, start_per_s: float, num_tries: int, step: float
) -> Greatest | None:
    """Find the greatest rate whose load keeps the target; None if no tried rate does.

    The rate is changed by the factor `step` until the target lies between two loads. Then `num_tries` loads
    halve this interval, or better: the next rate is where a line between both ends crosses the target, in
    logarithms.
    """
    kept: tuple[float, float, Figures] | None = None  # rate, used share of the target, figures
    missed: tuple[float, float, Figures] | None = None
    tried, steps_left, tries_left = start_per_s, _MAX_STEPS, num_tries
    while True:
        figures = figures_at(tried)
        used = target.used(figures)
        if used <= 1:
            kept = (tried, used, figures)
        else:
            missed = (tried, used, figures)
        if kept is not None and missed is not None:
            if not tries_left:
                break
            tries_left -= 1
            tried = _between(kept[:2], missed[:2])
        else:
            if not steps_left:
                break
            steps_left -= 1
            tried = tried * step if kept is not None else tried / step
    return None if kept is None else Greatest(kept[0], kept[2], missed and missed[2])


def _between(kept: tuple[float, float], missed: tuple[float, float]) -> float:
    """Return a rate between those of two loads, near the one that uses all of the target."""
    share = 0.5
    if kept[1] > 0 and math.isfinite(missed[1]):
        share = -math.log(kept[1]) / (math.log(missed[1]) - math.log(kept[1]))
    share = min(max(share, _EDGE), 1 - _EDGE)
    return float(kept[0] * (missed[0] / kept[0]) ** share)


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
