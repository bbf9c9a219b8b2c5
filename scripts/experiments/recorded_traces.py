"""Eviction policies on recorded traces, which the paper did not have: every order, both tiers, several sizes.

Owns: how each kind of trace is served, and the sizes of memory, which are shares of the tokens of the trace.
Does not know: file formats.
Called by: the registry.

Recorded arrivals are kept where a file has them and they make memory scarce; elsewhere sessions arrive at
random, at a rate that does. Pauses are the recorded ones throughout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiments.eviction import RETENTION_OVER, by_policy, policy_panel, retention_over
from experiments.machines import profile_name
from experiments.points import UNITS, Measured, Point
from experiments.seeds import Group, groups
from experiments.settings import (
    SIMULATION_FLAGS,
    Experiment,
    Findings,
    Row,
    Settings,
    Table,
    TraceFile,
)
from experiments.systems import BOTH_TIERS, ONE_TIER, System, engine, memory_of_tokens
from experiments.workloads import Workload
from pensieve_jax import ConfigError
from pensieve_jax.workload import ExponentialThink, RecordedThink

_MODEL = "llama2-13b-gqa10"
_BOTH, _ALONE = "both tiers", "device alone"
_GPU_SHARE = 0.25  # of all memory
_GPU_LEAST = 1.25  # longest conversations
_CPU_LEAST = 0.5  # of the device's


@dataclass(frozen=True, kw_only=True)
class _Study:
    """How traces of a format are served.

    Attributes:
      share: of the conversations, drawn by seed.
      rate_per_s: of sessions; None keeps recorded arrivals.
      num_sessions: at most so many.
      time_scale: multiplies times, so that one device keeps up; what is recent stays recent.
      max_context_tokens: conversations end before they outgrow it.
      chunk_tokens: of a page.
      memory_shares: device and host memory together, as shares of the tokens of all conversations.
    """

    share: float = 1.0
    rate_per_s: float | None = None
    num_sessions: int | None = None
    time_scale: float = 1.0
    max_context_tokens: int = 131_072
    chunk_tokens: int = 64
    memory_shares: Sequence[float] = (1 / 32, 1 / 12, 1 / 5)


STUDIES = {
    "burstgpt": _Study(
        rate_per_s=0.3,
        num_sessions=600,
        max_context_tokens=8192,
        chunk_tokens=32,
        memory_shares=(1 / 16, 1 / 8, 1 / 4),
    ),
    "mooncake": _Study(share=0.12, time_scale=4.0),
    "agent-sessions": _Study(rate_per_s=0.008, num_sessions=24, time_scale=4.0, memory_shares=(1 / 8, 1 / 4)),
    "bailian": _Study(),
    "pensieve": _Study(),
}
"""By format: the files that can be studied."""


class _Place(NamedTuple):
    """Memory of one point, in tokens."""

    gpu_tokens: int
    cpu_tokens: int


def points(settings: Settings) -> list[Point]:
    """Orders over sizes for every trace, with both tiers and with the device's alone."""
    if not settings.traces:
        raise ConfigError("--traces", "", "at least one FORMAT:FILE for this experiment")
    return [point for trace in settings.traces for point in _of_trace(settings, trace)]


def _of_trace(settings: Settings, trace: TraceFile) -> list[Point]:
    study = STUDIES.get(trace.format)
    if study is None:
        raise ConfigError("--traces", trace.format, f"of a format among {', '.join(STUDIES)}")
    workload = _workload(trace, study)
    sessions = workload.sessions(settings.seeds[0])
    num_tokens = sum(session.conversation.num_tokens for session in sessions)
    longest = max(session.conversation.num_tokens for session in sessions)
    shares = study.memory_shares[-2:] if settings.small else study.memory_shares
    places = list(dict.fromkeys(_place(share * num_tokens, longest, study.chunk_tokens) for share in shares))
    alone = list(dict.fromkeys(place._replace(cpu_tokens=0) for place in places))
    return [
        _point(settings, trace.path.name, workload, study, system, place, seed)
        for kind, of_kind in ((BOTH_TIERS, places), (ONE_TIER, alone))
        for place in of_kind
        for system in by_policy(kind)
        for seed in settings.seeds
    ]


def _workload(trace: TraceFile, study: _Study) -> Workload:
    return Workload(
        trace=(trace.path, trace.format),
        share=study.share,
        max_context_tokens=study.max_context_tokens,
        rate_per_s=study.rate_per_s,
        think=RecordedThink(otherwise=ExponentialThink(60.0)),
        num_sessions=study.num_sessions,
        time_scale=study.time_scale,
    )


def _place(num_tokens: float, longest: int, chunk_tokens: int) -> _Place:
    """Sizes of two digits; the device holds whole chunks, and the longest conversation with room to spare.

    The host holds at least half as much, whatever was asked for.
    """
    magnitude = 10 ** max(len(str(round(num_tokens))) - 2, 0)
    total = round(num_tokens / magnitude) * magnitude
    gpu_tokens = math.ceil(max(_GPU_SHARE * total, _GPU_LEAST * longest) / chunk_tokens) * chunk_tokens
    return _Place(gpu_tokens, max(total - gpu_tokens, round(_CPU_LEAST * gpu_tokens)))


def _point(
    settings: Settings,
    name: str,
    workload: Workload,
    study: _Study,
    system: System,
    place: _Place,
    seed: int,
) -> Point:
    device = settings.device
    tiers = _BOTH if system.has_host_tier else _ALONE
    return Point(
        panel=f"{name}, {tiers}",
        series=system.policy,
        x=place.gpu_tokens + place.cpu_tokens,
        seed=seed,
        device=device,
        model=_MODEL,
        engine=engine(
            system,
            device,
            _MODEL,
            memory_bytes=memory_of_tokens(device, _MODEL, place.gpu_tokens, place.cpu_tokens),
            max_context_tokens=min(study.max_context_tokens, place.gpu_tokens),
            chunk_tokens=study.chunk_tokens,
        ),
        workload=workload,
    )


def findings(settings: Settings, measured: list[Measured]) -> Findings:
    """Which policy recomputes least where, and by how much."""
    found = groups(measured)
    compared = retention_over(found)
    panels = dict.fromkeys(group.panel for group in found)
    return Findings(
        tables=[
            Table(
                title="Recorded traces, means over seeds", columns=_COLUMNS, rows=[_row(one) for one in found]
            ),
            Table(
                title=RETENTION_OVER,
                columns=["trace", "tokens of memory", "policy", "retention / policy"],
                rows=[[panel, round(x), policy, str(ratio)] for panel, x, policy, ratio in compared],
            ),
        ],
        panels=[
            policy_panel(found, panel, "tokens of memory", log_x=True)
            for panel in panels
            if panel.endswith(_BOTH)
        ],
        results={
            "traces": [_described(settings, trace) for trace in settings.traces],
            "points": [group.as_dict() for group in found],
            "retention_over": [
                {"panel": panel, "x": x, "policy": policy, **ratio._asdict()}
                for panel, x, policy, ratio in compared
            ],
        },
        profiles=[profile_name(settings.device, _MODEL)],
        units=UNITS
        | {
            "x": "tokens of device and host memory together",
            "retention_over": "recompute_share of retention / of the policy",
        },
    )


_COLUMNS = (
    *("trace", "tokens of memory", "policy", "gpu hits", "cpu hits", "tokens lost", "recompute s", "share"),
    "ms/token",
)


def _row(group: Group) -> Row:
    return [
        *(group.panel, round(group.x), group.series, group.mean("gpu_hit_rate"), group.mean("cpu_hit_rate")),
        1 - group.mean("found_rate"),
        *(group.mean("recompute_s"), group.mean("recompute_share"), f"{1e3 * group.latency_s:.1f}"),
    ]


def _described(settings: Settings, trace: TraceFile) -> dict[str, object]:
    """What was served of a file, by its name alone."""
    study = STUDIES[trace.format]
    workload = _workload(trace, study)
    return {
        "file": trace.path.name,
        "format": trace.format,
        "digest": workload.conversations(settings.seeds[0]).digest,
        "study": {**dataclasses.asdict(study), "memory_shares": list(study.memory_shares)},
    }


RECORDED_TRACES = Experiment(
    name="traces",
    title="Eviction policies on recorded traces",
    paper="Not in the paper, which had conversations without times.",
    points=points,
    findings=findings,
    flags=SIMULATION_FLAGS | {"traces"},
)
