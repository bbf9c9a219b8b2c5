"""Replay settings of each kind of recorded trace: sessions, rate and memory.

Owns: those choices, and which sessions a learning policy may have seen before.
Does not know: eviction policies, or what is made of the runs.
Called by `recorded_traces` and `oracle`.

Recorded arrivals are kept if a file has them and they make memory scarce; otherwise sessions arrive at random
at a rate that does. Think times are always the recorded ones. The paper's load is added for comparison:
generated after its Table 2, with its mean think time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pensieve_jax import ConfigError
from pensieve_lab.experiments.settings import TraceFile
from pensieve_lab.experiments.workloads import CHOSEN_ON, HELD_OUT, Workload
from pensieve_lab.workload import ExponentialThink, RecordedThink

_GPU_SHARE = 0.25  # of all memory
_GPU_LEAST = 1.25  # smallest device memory, in longest conversations
_CPU_LEAST = 0.5  # smallest host memory, relative to the device's
_THINK_S = 60.0  # the paper's mean; also where a recorded trace lacks a think time
_PAPER_CONTEXT_TOKENS = 16_384
_SMALL, _SMALL_LEAST = 0.06, 40  # share of a study's sessions, and the smallest number


@dataclass(frozen=True, kw_only=True)
class Study:
    """Replay settings of traces of a format.

    Attributes:
      title: of the trace.
      between_s: the part of a recording that is served; the policy learns from the time before. None is the
        whole recording. In both cases the held-out half is served, and the policy learns from the other half.
      share: share of the remaining conversations, drawn by seed.
      rate_per_s: of sessions; None keeps recorded arrivals.
      num_sessions: largest number of sessions.
      time_scale: factor for times, so that one device keeps up; the order of recency stays.
      max_context_tokens: conversations end before they exceed it.
      chunk_tokens: of a page.
      memory_shares: device and host memory together, as shares of the tokens of all conversations.
    """

    title: str
    between_s: tuple[float, float] | None = None
    share: float = 1.0
    rate_per_s: float | None = None
    num_sessions: int | None = None
    time_scale: float = 1.0
    max_context_tokens: int = 131_072
    chunk_tokens: int = 64
    memory_shares: Sequence[float] = (1 / 32, 1 / 12, 1 / 5)

    def workload(self, file: TraceFile, *, small: bool) -> Workload:
        """Return the workload of the results."""
        whole = Workload(
            trace=(file.path, file.format),
            between_s=self.between_s,
            half=HELD_OUT,
            share=self.share,
            max_context_tokens=self.max_context_tokens,
            rate_per_s=self.rate_per_s,
            think=RecordedThink(otherwise=ExponentialThink(_THINK_S)),
            num_sessions=self.num_sessions,
            time_scale=self.time_scale,
        )
        return _small(whole) if small else whole

    def earlier_workload(self, workload: Workload) -> Workload:
        """Return the workload that may have been seen before `workload`."""
        between_s = None if self.between_s is None else (0.0, self.between_s[0])
        return replace(workload, half=CHOSEN_ON, between_s=between_s)


def _small(whole: Workload) -> Workload:
    """Return a part of the workload, or a few sessions if that is more."""
    if whole.num_sessions is not None:
        return replace(whole, num_sessions=max(round(_SMALL * whole.num_sessions), 1))
    num_left = len(replace(whole, share=1.0).conversations(0).conversations)
    return replace(whole, share=min(max(_SMALL * whole.share, _SMALL_LEAST / num_left), 1.0))


class Place(NamedTuple):
    """Memory of one point, in tokens."""

    gpu_tokens: int
    cpu_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of both tiers."""
        return self.gpu_tokens + self.cpu_tokens


class StudiedTrace(NamedTuple):
    """A trace, its workload, the earlier one from which a policy learns, and memory sizes in rising order."""

    title: str
    workload: Workload
    earlier_workload: Workload
    chunk_tokens: int
    places: Sequence[Place]


STUDIES = {
    "mooncake": (
        Study(title="Mooncake", share=0.35, time_scale=4.0),
        Study(title="Mooncake, minutes 21-40", between_s=(1260.0, 2400.0), share=0.5, time_scale=4.0),
    ),
    "agent-sessions": (
        Study(
            title="agents",
            rate_per_s=0.008,
            num_sessions=32,
            time_scale=4.0,
            memory_shares=(1 / 16, 1 / 8, 1 / 4),
        ),
    ),
    "burstgpt": (
        Study(
            title="BurstGPT",
            rate_per_s=1.0,
            num_sessions=800,
            max_context_tokens=8192,
            chunk_tokens=32,
            memory_shares=(1 / 16, 1 / 8, 1 / 4),
        ),
    ),
    "bailian": (Study(title="Bailian"),),
    "pensieve": (Study(title="trace"),),
}
"""Studies of each trace format."""

PAPER_TITLE = "paper's load"
_PAPER = Workload(
    shape="sharegpt",
    half=HELD_OUT,
    max_context_tokens=_PAPER_CONTEXT_TOKENS,
    rate_per_s=1.0,
    think=ExponentialThink(_THINK_S),
    mid_life_s=80 * _THINK_S,  # the longest conversations have 67 turns
    warm_up_s=60.0,
    window_s=240.0,
)
_PAPER_PLACES = (Place(80_000, 120_000), Place(140_000, 210_000), Place(200_000, 300_000))
_SMALL_PAPER = replace(
    _PAPER, max_context_tokens=2048, rate_per_s=0.12, mid_life_s=20 * _THINK_S, warm_up_s=20.0, window_s=100.0
)
_SMALL_PAPER_PLACES = tuple(Place(8192, tokens) for tokens in (4000, 8000, 16_000))


def studied_file(file: TraceFile, seed: int, *, small: bool) -> list[StudiedTrace]:
    """Return a file's studies, sized by a seed's sessions; raises ConfigError for an unknown format."""
    studies = STUDIES.get(file.format)
    if studies is None:
        raise ConfigError("--traces", file.format, f"of a format among {', '.join(STUDIES)}")
    return [_studied(study, file, seed, small=small) for study in studies]


def studied_paper(*, small: bool) -> StudiedTrace:
    """Return the study of the paper's load."""
    workload, places = (_SMALL_PAPER, _SMALL_PAPER_PLACES) if small else (_PAPER, _PAPER_PLACES)
    return StudiedTrace(PAPER_TITLE, workload, replace(workload, half=CHOSEN_ON), 32, places)


def _studied(study: Study, file: TraceFile, seed: int, *, small: bool) -> StudiedTrace:
    workload = study.workload(file, small=small)
    sessions = workload.sessions(seed)
    num_tokens = sum(session.conversation.num_tokens for session in sessions)
    longest = max(session.conversation.num_tokens for session in sessions)
    places = dict.fromkeys(_place(share * num_tokens, longest, study.chunk_tokens)
                           for share in study.memory_shares)  # fmt: skip
    earlier = study.earlier_workload(workload)
    return StudiedTrace(study.title, workload, earlier, study.chunk_tokens, tuple(places))


def _place(num_tokens: float, longest: int, chunk_tokens: int) -> Place:
    """Return sizes of two digits; the device holds whole chunks, and 1.25 times the longest conversation.

    The host holds at least half as much, whatever was requested.
    """
    magnitude = 10 ** max(len(str(round(num_tokens))) - 2, 0)
    total = round(num_tokens / magnitude) * magnitude
    gpu_tokens = math.ceil(max(_GPU_SHARE * total, _GPU_LEAST * longest) / chunk_tokens) * chunk_tokens
    return Place(gpu_tokens, max(total - gpu_tokens, round(_CPU_LEAST * gpu_tokens)))
