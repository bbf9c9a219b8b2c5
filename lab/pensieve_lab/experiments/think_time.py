"""Users with longer think times: the paper's Figure 15, whose first half is the thesis's Figure 3.16.

Owns: think times and loads of that experiment.
Does not know: how curves are read at a level (`levels`).
Called by `experiments.registry` and `long_warm_up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pensieve_lab.experiments.levels import BySeed, in_cell, ratios, throughputs_at
from pensieve_lab.experiments.machines import profile_name
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.paper_sweeps import LLAMA_SHAREGPT
from pensieve_lab.experiments.points import UNITS, Measured, Point
from pensieve_lab.experiments.seeds import Group, groups
from pensieve_lab.experiments.settings import Experiment, Findings, Row, Settings, Table
from pensieve_lab.experiments.systems import (
    BOTH_TIERS,
    NO_STATE,
    System,
    context_tokens_of_paper,
    engine_of_paper,
)
from pensieve_lab.experiments.workloads import Workload
from pensieve_lab.workload import ExponentialThink

_MODEL = LLAMA_SHAREGPT.model
# Loads from below the latency level to above it, by mean think time; one load is common to all.
_RATES_PER_S: dict[str, dict[int, tuple[float, ...]]] = {
    "a100": {
        30: (1.2, 1.8, 2.1, 2.4, 2.7),
        60: (1.2, 1.5, 1.8, 2.1, 2.4),
        120: (0.6, 0.9, 1.2, 1.5),
        300: (0.6, 0.75, 0.9, 1.2),
        600: (0.6, 0.75, 0.9, 1.2),
    },
    "h200": dict.fromkeys((30, 60, 120, 300, 600), (1.4, 1.8, 2.2, 2.6)),
}
# Think times affect the stateless system only through arrivals, so the shortest and the longest suffice.
_STATELESS_RATES_PER_S: dict[str, dict[int, tuple[float, ...]]] = {
    "a100": dict.fromkeys((60, 600), (0.45, 0.6, 0.75)),
    "h200": dict.fromkeys((60, 600), (0.7, 1.0, 1.4, 1.8)),
}
_SHOWN_RATE_PER_S = {"a100": 1.2, "h200": 1.8}
_SMALL_RATES_PER_S = dict.fromkeys((5, 20, 80), (0.2, 0.5, 0.8))
_SMALL_STATELESS_RATES_PER_S = {80: (0.2, 0.5, 0.8)}
_SMALL_SHOWN_RATE_PER_S = 0.8
_LIVES = 80  # mean think times of mid-life, as in Figure 10: the longest conversations have 67 turns
_WARM_UPS = 4  # mean think times of warm-up: mid-life histories have no KV cache until their users return
_CUT_AT = 2.5  # multiple of the level, as in Figure 10


def points(settings: Settings) -> list[Point]:
    """Return the points of systems by think time, over loads."""
    return [
        point_of(settings, system, think_s, rate, seed)
        for system in (BOTH_TIERS, NO_STATE)
        for think_s, rates in _rates(settings, system).items()
        for rate in rates
        for seed in settings.seeds
    ]


def _rates(settings: Settings, system: System) -> Mapping[int, Sequence[float]]:
    """Return the conversations that begin per second, by mean think time."""
    if settings.small:
        return _SMALL_RATES_PER_S if system == BOTH_TIERS else _SMALL_STATELESS_RATES_PER_S
    return (_RATES_PER_S if system == BOTH_TIERS else _STATELESS_RATES_PER_S)[settings.device]


def point_of(settings: Settings, system: System, think_s: float, rate: float, seed: int) -> Point:
    """Return the run of users with this mean think time and this rate of conversations."""
    device, small = settings.device, settings.small
    return Point(
        panel=_panel_name(rate),
        series=system.name,
        x=think_s,
        seed=seed,
        device=device,
        model=_MODEL,
        engine=engine_of_paper(system, device, _MODEL, small=small),
        workload=Workload(
            shape=LLAMA_SHAREGPT.shape,
            max_context_tokens=context_tokens_of_paper(small=small),
            rate_per_s=rate,
            think=ExponentialThink(think_s),
            mid_life_s=_LIVES * think_s,
            warm_up_s=(2 if small else _WARM_UPS) * think_s,
            window_s=30.0 if small else 240.0,
        ),
    )


def _panel_name(rate: float) -> str:
    return f"{rate:g} conversations a second"


def findings(settings: Settings, measured: list[Measured]) -> Findings:
    """Return hit rates by think time at each load, and throughput at a latency level."""
    found = groups(measured)
    level_s = LLAMA_SHAREGPT.level_s[settings.device]
    places = dict.fromkeys((group.series, group.x) for group in found)
    at_level = {place: throughputs_at(level_s, _curve(found, *place)) for place in places}
    longest = max(think_s for _, think_s in places)
    over = {place: ratios(by_seed, at_level[NO_STATE.name, longest]) for place, by_seed in at_level.items()}
    return Findings(
        tables=[
            Table(title="By think time", columns=_COLUMNS, rows=[_row(group) for group in found]),
            Table(
                title=f"Requests a second at {1e3 * level_s:g} ms a token, mean and range over seeds, and "
                f"over those of {NO_STATE.name} whose users think for {longest:g} s",
                columns=["system", "think s", "requests/s", f"x {NO_STATE.name}"],
                rows=[_level_row(place, at_level[place], over[place]) for place in places],
            ),
        ],
        panels=[_latencies(settings, found, places), _found(found, _panel_name(_shown_rate(settings)))],
        results={
            "points": [group.as_dict() for group in found],
            "shown_rate_per_s": _shown_rate(settings),
            "at_level": level_results(level_s, at_level, over),
        },
        profiles=[profile_name(settings.device, _MODEL)],
        units=UNITS
        | {
            "x": "mean think time in seconds",
            "at_level": "requests a second at which the mean normalized latency first exceeds level_s, by "
            f"seed, and its ratio to that of {NO_STATE.name} at the longest think time; null for a seed "
            "where it never does",
        },
    )


def level_results(
    level_s: float, at_level: Mapping[tuple[str, float], BySeed], over: Mapping[tuple[str, float], BySeed]
) -> list[dict[str, object]]:
    """Return the results of each system and think time for a document."""
    return [
        {
            "system": name,
            "think_s": think_s,
            "level_s": level_s,
            "requests_per_s_by_seed": by_seed,
            "ratio_by_seed": over[name, think_s],
        }
        for (name, think_s), by_seed in at_level.items()
    ]


_COLUMNS = ("system", "think s", "rate", "requests/s", "ms/token", "gpu hits", "cpu hits", "share")


def _row(group: Group) -> Row:
    return [
        *(group.series, f"{group.x:g}", f"{group.rate_per_s:g}", group.mean("requests_per_s")),
        f"{1e3 * group.latency_s:.1f}",
        *(group.mean(name) for name in ("gpu_hit_rate", "cpu_hit_rate", "recompute_share")),
    ]


def _level_row(place: tuple[str, float], by_seed: BySeed, over: BySeed) -> Row:
    return [place[0], f"{place[1]:g}", in_cell(by_seed), in_cell(over)]


def _curve(groups: Sequence[Group], series: str, think_s: float) -> list[Group]:
    """Return the groups of a curve, sorted by load."""
    of_series = (group for group in groups if (group.series, group.x) == (series, think_s))
    return sorted(of_series, key=lambda group: group.rate_per_s or 0.0)


def _shown_rate(settings: Settings) -> float:
    """Return a load that all think times share."""
    return _SMALL_SHOWN_RATE_PER_S if settings.small else _SHOWN_RATE_PER_S[settings.device]


def _latencies(settings: Settings, groups: Sequence[Group], places: Iterable[tuple[str, float]]) -> Panel:
    """Return the paper's panel: both tiers by think time, and the stateless system for comparison."""
    level_s = LLAMA_SHAREGPT.level_s[settings.device]
    shown = {
        f"{'both tiers' if series == BOTH_TIERS.name else 'no state'}, {think_s:g} s": (series, think_s)
        for series, think_s in places
    }
    return Panel(
        title="users by mean think time",
        x_label="requests answered a second",
        y_label="mean ms per output token",
        curves={
            name: [(group.mean("requests_per_s"), 1e3 * group.latency_s) for group in _curve(groups, *place)]
            for name, place in shown.items()
        },
        dashed=frozenset(name for name, (series, _) in shown.items() if series == NO_STATE.name),
        level=1e3 * level_s,
        y_max=None if settings.small else _CUT_AT * 1e3 * level_s,
    )


def _found(groups: Sequence[Group], panel: str) -> Panel:
    return Panel(
        title=f"cache hit rate at {panel}",
        x_label="mean think time in seconds",
        y_label="share of history tokens reused",
        curves={
            BOTH_TIERS.label: [
                (group.x, group.mean("found_rate"))
                for group in groups
                if (group.panel, group.series) == (panel, BOTH_TIERS.name)
            ]
        },
        log_x=True,
    )


THINK_TIME = Experiment(
    name="fig15",
    title="Llama-2-13B, mean think times from 30 to 600 seconds",
    paper="Llama-2-13B on ShareGPT: throughput falls as users think for longer, and at 600 s it is still "
    "ahead of vLLM (section 6.7); with 120 s by around 40% (thesis section 3.6.5, Figure 3.16).",
    points=points,
    findings=findings,
)
