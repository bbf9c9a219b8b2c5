"""Workload of a simulated run: generated or recorded conversations, arrivals and think times.

Owns: the few kinds of workload that experiments have, as values.
Does not know: which system serves them.
Called by the experiments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from pensieve_lab.workload import (
    SHAPES,
    ExponentialThink,
    Session,
    ThinkTime,
    Trace,
    between,
    cap_context,
    generate_trace,
    make_sessions,
    read_trace,
    split_by_session,
    start_mid_life,
    with_min_turns,
)

_NUM_CONVERSATIONS = 5000  # generated conversations, from which sessions are drawn
_PAPER_THINK = ExponentialThink(60.0)
CHOSEN_ON, HELD_OUT = 0, 1
"""Halves: where parameters were chosen and policies learn, and where results are taken."""
_MID_LIFE_TOKEN_S = 0.03  # time per answer token before the run: a system that is neither idle nor overloaded


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sessions of one run.

    Attributes:
      shape: distribution of generated conversations: a key of `SHAPES`; None with a `trace`.
      trace: a recorded file and its format instead.
      between_s: the part of a recorded trace that is used; None is all of it.
      half: half of the sessions by `split_by_session`: CHOSEN_ON or HELD_OUT; None is all.
      share: share of a recorded trace's conversations that is drawn, by seed, after halving.
      min_turns: conversations with fewer turns are left out.
      max_context_tokens: conversations end before they exceed it.
      rate_per_s: conversations that begin per second; None is as recorded.
      think: think times of users.
      time_scale: factor for arrivals and think times; a factor above 1 acts like a faster device.
      num_sessions: largest number; None is as many as the run has time for.
      mid_life_s: time between the first arrivals and the start of the run.
      warm_up_s, window_s: time before and during the measurement; None serves everything to its end.
    """

    shape: str | None = None
    trace: tuple[Path, str] | None = None
    between_s: tuple[float, float] | None = None
    half: int | None = None
    share: float = 1.0
    min_turns: int = 1
    max_context_tokens: int = 16_384
    rate_per_s: float | None
    think: ThinkTime = _PAPER_THINK
    time_scale: float = 1.0
    num_sessions: int | None = None
    mid_life_s: float = 0.0
    warm_up_s: float = 0.0
    window_s: float | None = None

    def sessions(self, seed: int) -> list[Session]:
        """Return the sessions by arrival; raises a workload's error, OSError for an unreadable file."""
        trace = self.conversations(seed)
        run_s = None if self.window_s is None else self.mid_life_s + self.warm_up_s + self.window_s
        found = make_sessions(
            trace,
            rate_per_s=self.rate_per_s,
            recorded=trace if self.rate_per_s is None else None,
            think=self.think,
            seed=seed,
            time_scale=self.time_scale,
            num_sessions=self.num_sessions,
            duration_s=run_s,
        )
        if not self.mid_life_s:
            return found
        return start_mid_life(found, at_s=self.mid_life_s, token_s=_MID_LIFE_TOKEN_S)

    def conversations(self, seed: int) -> Trace:
        """Return the conversations from which sessions are drawn."""
        if self.trace is None:
            assert self.shape is not None
            return _half(_made(self.shape, seed, self.max_context_tokens, self.min_turns), self.half)
        whole = _half(self._recorded(), self.half)
        if self.share == 1.0:
            return whole
        num_drawn = max(round(self.share * len(whole.conversations)), 1)
        drawn = np.random.default_rng(seed).permutation(len(whole.conversations))[:num_drawn]
        return replace(whole, conversations=tuple(whole.conversations[i] for i in sorted(drawn.tolist())))

    def _recorded(self) -> Trace:
        assert self.trace is not None
        whole = _recorded(*self.trace, self.max_context_tokens, self.min_turns)
        return whole if self.between_s is None else between(whole, *self.between_s)


def _half(trace: Trace, half: int | None) -> Trace:
    return trace if half is None else split_by_session(trace)[half]


@lru_cache(maxsize=8)  # one entry per seed
def _made(shape: str, seed: int, max_context_tokens: int, min_turns: int) -> Trace:
    trace = generate_trace(
        SHAPES[shape],
        num_conversations=_NUM_CONVERSATIONS,
        seed=seed,
        max_context_tokens=max_context_tokens,
    )
    return with_min_turns(trace, min_turns)


@lru_cache(maxsize=8)  # one entry per seed
def _recorded(path: Path, format: str, max_context_tokens: int, min_turns: int) -> Trace:
    trace = cap_context(read_trace(path, format=format), max_context_tokens)
    return with_min_turns(trace, min_turns)
