"""The part of a trace for one GPU: as many conversations as a stateless server answers in time.

Owns: which conversations are served, when they begin, and the search for the part.
Does not know: the server, except for its mean latency.

If the slowest system keeps up with a load, all systems can be compared on it. Beyond that load, latencies
only measure the length of the trace. A trace with arrivals is thinned, as a router with session affinity
would do. A trace without them gets Poisson arrivals at a given rate, or less if that is not in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pensieve_lab.workload import ExponentialThink, RecordedThink, Session, Trace, make_sessions

_NEAR_ENOUGH = 0.6  # stop the search at this share of the latency level
_MAX_TRIES = 7
_OTHERWISE_THINK_S = 60.0

type Latency = Callable[[Sequence[Session]], float]
"""Return the mean latency per token (s) of the stateless system for these sessions."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Conversations to serve.

    Attributes:
      share: share of the trace's conversations.
      rate_per_s: conversations that arrive per second; None if arrivals are as recorded.
      has_pauses: whether every pause between turns was recorded; missing pauses are drawn.
      sessions: in order of arrival.
      in_time: whether they were answered within the latency level; None if no level was given.
    """

    share: float
    rate_per_s: float | None
    has_pauses: bool
    sessions: list[Session]
    in_time: bool | None = None

    @property
    def of_all(self) -> str:
        """Quantity for a sentence: "all of" or "12% of" a trace."""
        return "all of" if self.share == 1 else f"{100 * self.share:.3g}% of"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Sampler of parts of a trace. With one seed, a smaller part is a subset of a larger one.

    Attributes:
      trace: the whole trace.
      time_scale: factor of recorded arrivals and pauses.
      seed: seed of all random draws.
    """

    trace: Trace
    time_scale: float
    seed: int

    @property
    def has_arrivals(self) -> bool:
        """Whether the arrival of every conversation was recorded."""
        return all(one.arrival_s is not None for one in self.trace.conversations)

    def part(self, share: float, rate_per_s: float | None) -> Part:
        """Draw a share of the conversations; raises the workload's error if the trace cannot be replayed."""
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

    def sessions(self, rate_per_s: float, duration_s: float) -> list[Session]:
        """Draw conversations that begin at a rate for some time, in another order after all were used.

        Rate and time are those of the run, whatever `time_scale` is.
        """
        return make_sessions(
            self.trace,
            rate_per_s=rate_per_s * self.time_scale,
            think=RecordedThink(otherwise=ExponentialThink(_OTHERWISE_THINK_S)),
            seed=self.seed,
            time_scale=self.time_scale,
            duration_s=duration_s,
        )

    def share_of_turns(self, max_turns: int) -> float:
        """Return the share of conversations that has about `max_turns` turns."""
        return min(1.0, max_turns / self.trace.num_turns)


def fitting_part(
    sampler: Sampler, max_turns: int, level_s: float, latency_s: Latency, rate_per_s: float = math.inf
) -> Part:
    """Find the largest part of about `max_turns` turns at most that is answered within `level_s` a token.

    The search bisects between a part that was in time and one that was not. It varies the share of a trace
    with arrivals, else the arrival rate up to `rate_per_s`, and stops near the level. If no part is in time,
    the smallest part that was tried is returned, with `in_time` False.
    """
    largest = sampler.share_of_turns(max_turns)
    tried = most = largest if sampler.has_arrivals else rate_per_s
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
