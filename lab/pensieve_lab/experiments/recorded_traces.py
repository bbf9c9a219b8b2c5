"""Eviction policies on recorded traces, which the paper did not have: every policy, both tiers, three sizes.

Owns: which runs there are, and what of them is kept.
Does not know: how a trace is served (`trace_studies`), or how results are shown (`trace_tables`).
Called by `experiments.registry`.

Results use held-out sessions: one half of them (`split_by_session`), of all times or of later ones. The
learning policy runs twice: without experience, and with experience from the other sessions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pensieve_jax import ConfigError
from pensieve_lab.experiments.eviction import by_policy
from pensieve_lab.experiments.machines import profile_name
from pensieve_lab.experiments.points import UNITS, Measured, Point
from pensieve_lab.experiments.returns import returns
from pensieve_lab.experiments.seeds import Group, groups, spread
from pensieve_lab.experiments.settings import SIMULATION_FLAGS, Experiment, Findings, Settings, TraceFile
from pensieve_lab.experiments.systems import BOTH_TIERS, System, engine, memory_of_tokens
from pensieve_lab.experiments.trace_studies import Place, StudiedTrace, studied_file, studied_paper
from pensieve_lab.experiments.trace_tables import BETTER_OF, TIERS, panels, tables
from pensieve_lab.workload import summarize

_MODEL = "llama2-13b-gqa10"
_LEARNED = "learned"
EXPERIENCED = "learned, with experience"
"""The learning policy, starting with experience from the other half of the sessions."""
_COMPARED = {
    "recompute": lambda figures: figures["recompute_share"],
    "latency": lambda figures: figures["normalized_latency_s"]["mean"],
    "first_token": lambda figures: figures["first_token_s"]["mean"],
}
"""Figures by which policies are compared, seed by seed."""


def points(settings: Settings) -> list[Point]:
    """Return points of all policies over sizes of both tiers, for every trace."""
    return [point for studied in studied_traces(settings) for point in _of(settings, studied)]


def studied_traces(settings: Settings) -> list[StudiedTrace]:
    """Return the given recorded traces, and the paper's load; raises ConfigError without any trace."""
    if not settings.traces:
        raise ConfigError("--traces", "", "at least one FORMAT:FILE for this experiment")
    found = [studied for file in settings.traces for studied in _of_file(settings, file)]
    return [*found, studied_paper(small=settings.small)]


def _of_file(settings: Settings, file: TraceFile) -> list[StudiedTrace]:
    found = studied_file(file, settings.seeds[0], small=settings.small)
    num_alike = sum(other.format == file.format for other in settings.traces)
    if num_alike == 1:
        return found
    return [studied._replace(title=f"{studied.title}, {file.path.name}") for studied in found]


def _of(settings: Settings, studied: StudiedTrace) -> list[Point]:
    places = studied.places[-2:] if settings.small else studied.places
    return [
        _point(settings, studied, replace(system, name=name), place, seed)
        for place in dict.fromkeys(places)
        for system in by_policy(BOTH_TIERS)
        for name in ((system.name, EXPERIENCED) if system.policy == _LEARNED else (system.name,))
        for seed in settings.seeds
    ]


def _point(settings: Settings, studied: StudiedTrace, system: System, place: Place, seed: int) -> Point:
    device, workload = settings.device, studied.workload
    return Point(
        panel=f"{studied.title}, {TIERS}",
        series=system.name,
        x=place.num_tokens,
        seed=seed,
        device=device,
        model=_MODEL,
        engine=engine(
            system,
            device,
            _MODEL,
            memory_bytes=memory_of_tokens(device, _MODEL, place.gpu_tokens, place.cpu_tokens),
            max_context_tokens=min(workload.max_context_tokens, place.gpu_tokens),
            chunk_tokens=studied.chunk_tokens,
        ),
        workload=workload,
        earlier_workload=studied.earlier_workload if system.name == EXPERIENCED else None,
    )


def findings(settings: Settings, measured: list[Measured]) -> Findings:
    """Return each policy's recomputation and latency, also relative to the better of LRU and retention."""
    found = groups(measured)
    results = {
        "traces": [_described(settings, studied) for studied in studied_traces(settings)],
        "points": [group.as_dict() for group in found],
        "beside_better": beside_better(found),
    }
    return Findings(
        tables=tables(results),
        panels=panels(results),
        results=results,
        profiles=[profile_name(settings.device, _MODEL)],
        units=UNITS
        | {
            "returns": "by recorded seconds that a conversation has been idle: rate of return x idle time",
            "x": "tokens of device and host memory together",
            "beside_better": "of an order / the lower one of lru and retention in the same seed: recompute "
            "is of recompute_share, latency of mean normalized_latency_s, first_token of mean "
            "first_token_s; null where the lower one is 0 in a seed",
        },
    )


def beside_better(groups: list[Group]) -> list[dict[str, Any]]:
    """Return the ratio of every policy to the better one of two at each place: mean and range over seeds."""
    by_place = {(group.panel, group.x, group.series): group for group in groups}
    rows = []
    for group in groups:
        bases = [by_place[group.panel, group.x, name] for name in BETTER_OF]
        row: dict[str, Any] = {"panel": group.panel, "x": group.x, "series": group.series}
        for name, get in _COMPARED.items():
            lowest = [min(values) for values in zip(*(base.values(get) for base in bases), strict=True)]
            pairs = list(zip(group.values(get), lowest, strict=True))
            ratios = spread([value / low for value, low in pairs]) if all(lowest) else None
            row[name] = None if ratios is None else {k: round(v, 4) for k, v in ratios._asdict().items()}
        rows.append(row)
    return rows


def _described(settings: Settings, studied: StudiedTrace) -> dict[str, Any]:
    """Return a description of what was served of a trace with the first seed; files by name only."""
    workload = studied.workload
    trace = workload.conversations(settings.seeds[0])
    summary = summarize(trace)
    sessions = workload.sessions(settings.seeds[0])
    turns = [(session, turn) for session in sessions for turn in range(1, len(session.conversation.turns))]
    histories = sorted(session.conversation.num_history_tokens(turn) for session, turn in turns)
    return {
        "title": studied.title,
        "file": None if workload.trace is None else workload.trace[0].name,
        "format": None if workload.trace is None else workload.trace[1],
        "digest": summary.digest,
        "num_sessions": len(sessions),
        "num_turns": sum(len(session.conversation.turns) for session in sessions),
        "returning_history_tokens": {
            "p50": histories[len(histories) // 2] if histories else None,
            "p90": histories[len(histories) * 9 // 10] if histories else None,
        },
        "rate_per_s": workload.rate_per_s,
        "time_scale": workload.time_scale,
        "share": workload.share,
        "between_s": workload.between_s,
        "returns": returns(trace),
    }


RECORDED_TRACES = Experiment(
    name="traces",
    title="Eviction orders on recorded traces",
    paper="Not in the paper, which had conversations without times.",
    points=points,
    findings=findings,
    flags=SIMULATION_FLAGS | {"traces"},
)
