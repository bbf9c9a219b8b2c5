"""Who comes when in a simulated run: conversations of a shape or a recorded trace, arrivals and pauses.

Owns: the few kinds of workload that experiments have, as values.
Does not know: who serves them.
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

_NUM_CONVERSATIONS = 5000  # made, to draw sessions from
_PAPER_THINK = ExponentialThink(60.0)
CHOSEN_ON, HELD_OUT = 0, 1
"""Halves: where parameters were chosen and experience is gathered, and where results are taken."""
_MID_LIFE_TOKEN_S = 0.03  # of answers before the run: a system that is neither idle nor late


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sessions of one run.

    Attributes:
      shape: what made conversations look like: a key of `SHAPES`; None where there is a `trace`.
      trace: a recorded file and its format instead.
      between_s: of a recorded trace, from when to when its recording is taken to run; None is all of it.
      half: of sessions, as `split_by_session` has them: CHOSEN_ON or HELD_OUT; None is all.
      share: of a recorded trace, the conversations that are drawn, by seed, after halving.
      min_turns: conversations of fewer are left out.
      max_context_tokens: conversations end before they outgrow it.
      rate_per_s: conversations that begin in a second; None is as recorded.
      think: how long users think.
      time_scale: multiplies arrivals and pauses; above 1 it is as if the device were so much faster.
      num_sessions: at most so many; None is as many as the run has time for.
      mid_life_s: the run begins this long after the first arrivals.
      warm_up_s, window_s: before anything counts, and while it does; None serves everything to its end.
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
        """In order of arrival; raises a workload's error, OSError for a file that cannot be read."""
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
        """What sessions are drawn from."""
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


@lru_cache(maxsize=8)  # as many as there may be seeds in turn
def _made(shape: str, seed: int, max_context_tokens: int, min_turns: int) -> Trace:
    trace = generate_trace(
        SHAPES[shape],
        num_conversations=_NUM_CONVERSATIONS,
        seed=seed,
        max_context_tokens=max_context_tokens,
    )
    return with_min_turns(trace, min_turns)


@lru_cache(maxsize=8)  # as many as there may be seeds in turn
def _recorded(path: Path, format: str, max_context_tokens: int, min_turns: int) -> Trace:
    trace = cap_context(read_trace(path, format=format), max_context_tokens)
    return with_min_turns(trace, min_turns)
