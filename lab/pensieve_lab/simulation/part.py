"""One GPU's part of a trace: as many of its conversations as a stateless server answers in time.

Owns: which conversations are served, when they begin, and how the part is found.
Does not know: what serves it beyond how long answers took.

A load that the slowest system keeps up with lets all of them be compared: past it, latencies say how long
the trace was. A trace with arrivals is thinned, as a router that keeps conversations in their place would;
one without them begins at random times, as often as it may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pensieve_lab.workload import ExponentialThink, RecordedThink, Session, Trace, make_sessions

_NEAR_ENOUGH = 0.6  # of the level
_MAX_TRIES = 7
_FIRST_RATE_PER_S, _MAX_RATE_PER_S = 1.0, 1000.0
_OTHERWISE_THINK_S = 60.0

type Latency = Callable[[Sequence[Session]], float]
"""Mean seconds a token that the stateless system takes to serve these."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is served.

    Attributes:
      share: of the conversations of the trace.
      rate_per_s: of conversations; None as recorded.
      has_pauses: every pause between turns was recorded; otherwise missing ones are drawn.
      sessions: in order of arrival.
      in_time: they were answered within the level that was asked for; None if none was.
    """

    share: float
    rate_per_s: float | None
    has_pauses: bool
    sessions: list[Session]
    in_time: bool | None = None

    @property
    def of_all(self) -> str:
        """As in "all of" a trace, and "12% of" it."""
        return "all of" if self.share == 1 else f"{100 * self.share:.3g}% of"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Parts of a trace of any size, each within the larger.

    Attributes:
      trace: all of it.
      time_scale: multiplies recorded arrivals and pauses.
      seed: of the draws.
    """

    trace: Trace
    time_scale: float
    seed: int

    @property
    def has_arrivals(self) -> bool:
        """Of every conversation."""
        return all(one.arrival_s is not None for one in self.trace.conversations)

    def part(self, share: float, rate_per_s: float | None) -> Part:
        """Raises a workload's error."""
        conversations = self.trace.conversations
        num_drawn = max(round(share * len(conversations)), 1)
        drawn = np.random.default_rng(self.seed).permutation(len(conversations))[:num_drawn]
        trace = replace(self.trace, conversations=tuple(conversations[i] for i in sorted(drawn.tolist())))
        pauses = (t for one in trace.conversations for t in one.turns[1:])
        sessions = make_sessions(
            trace,
            rate_per_s=rate_per_s,
            recorded=trace if rate_per_s is None else None,
            think=RecordedThink(otherwise=ExponentialThink(_OTHERWISE_THINK_S)),
            seed=self.seed,
            time_scale=self.time_scale,
        )
        return Part(
            share=num_drawn / len(conversations),
            rate_per_s=rate_per_s,
            has_pauses=all(t.gap_s is not None or t.think_s is not None for t in pauses),
            sessions=sessions,
        )

    def share_of_turns(self, max_turns: int) -> float:
        """Of the conversations that have about so many turns."""
        return min(1.0, max_turns / self.trace.num_turns)


def fitting_part(sampler: Sampler, max_turns: int, level_s: float, latency_s: Latency) -> Part:
    """The largest part of at most about `max_turns` that is answered within `level_s` a token, or nearly.

    Found by serving parts, between one that was answered in time and one that was not: shares of a trace
    with arrivals, else rates. If none is in time it is the smallest that was tried, which says so.
    """
    largest = sampler.share_of_turns(max_turns)
    most = largest if sampler.has_arrivals else _MAX_RATE_PER_S
    tried = largest if sampler.has_arrivals else _FIRST_RATE_PER_S
    in_time, too_much = 0.0, math.inf
    best: Part | None = None
    for _ in range(_MAX_TRIES):
        part = sampler.part(tried, None) if sampler.has_arrivals else sampler.part(largest, tried)
        found_s = latency_s(part.sessions)
        if found_s > level_s:
            too_much = tried
        else:
            in_time, best = tried, replace(part, in_time=True)
            if found_s >= _NEAR_ENOUGH * level_s or tried == most:
                break
        lower, upper = in_time or too_much / 16, min(too_much, 16 * tried)
        tried = min(math.sqrt(lower * upper), most)
    return best or replace(part, in_time=False)
