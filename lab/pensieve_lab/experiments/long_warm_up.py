"""Check that the level of Figure 10b is read in a steady state: its users again, after a tenfold warm-up.

Owns: which of Figure 15's settings are simulated again, and the warm-up.
Does not know: what a run of those settings is (`think_time`), or how curves are read (`levels`).
Called by `experiments.registry`.
"""

from __future__ import annotations

import dataclasses

from pensieve_lab.experiments.levels import BySeed, in_cell, ratios, throughputs_at
from pensieve_lab.experiments.machines import profile_name
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.paper_sweeps import LLAMA_SHAREGPT
from pensieve_lab.experiments.points import UNITS, Measured, Point
from pensieve_lab.experiments.seeds import Group, groups
from pensieve_lab.experiments.settings import Experiment, Findings, Row, Settings, Table
from pensieve_lab.experiments.systems import BOTH_TIERS, NO_STATE, System
from pensieve_lab.experiments.think_time import level_results, point_of

_WARM_UP_S, _SMALL_WARM_UP_S = 2400.0, 60.0  # as in Figure 15 at its longest think time: four times 600 s
# Loads of Figures 10b and 15 on both sides of the level, by system and mean think time.
_RATES_PER_S = (
    (BOTH_TIERS, 60, (1.5, 1.8)),
    (NO_STATE, 60, (0.45, 0.6, 0.75, 0.9)),
    (NO_STATE, 120, (0.45, 0.6, 0.75, 0.9)),
)
_SMALL_RATES_PER_S = ((BOTH_TIERS, 20, (0.2, 0.8)), (NO_STATE, 20, (0.2, 0.8)))
_CUT_AT = 2.5  # multiple of the level, as in Figure 10


def points(settings: Settings) -> list[Point]:
    """Return the points of systems by think time, over loads."""
    return [
        _after(settings, point_of(settings, system, think_s, rate, seed))
        for system, think_s, rates in (_SMALL_RATES_PER_S if settings.small else _RATES_PER_S)
        for rate in rates
        for seed in settings.seeds
    ]


def _after(settings: Settings, point: Point) -> Point:
    warm_up_s = _SMALL_WARM_UP_S if settings.small else _WARM_UP_S
    return dataclasses.replace(point, workload=dataclasses.replace(point.workload, warm_up_s=warm_up_s))


def findings(settings: Settings, measured: list[Measured]) -> Findings:
    """Return throughput at the level, and relative to the stateless system with the same users."""
    found = groups(measured)
    level_s = LLAMA_SHAREGPT.level_s[settings.device]
    places = dict.fromkeys((group.series, group.x) for group in found)
    at_level = {place: throughputs_at(level_s, _curve(found, *place)) for place in places}
    over = {
        (name, think_s): ratios(by_seed, at_level[NO_STATE.name, think_s])
        for (name, think_s), by_seed in at_level.items()
    }
    warm_up_s = measured[0].point.workload.warm_up_s
    return Findings(
        tables=[
            Table(title=f"After {warm_up_s:g} s", columns=_COLUMNS, rows=[_row(group) for group in found]),
            Table(
                title=f"Requests a second at {1e3 * level_s:g} ms a token, mean and range over seeds, and "
                f"over those of {NO_STATE.name} with the same users",
                columns=["system", "think s", "requests/s", f"x {NO_STATE.name}"],
                rows=[_level_row(place, at_level[place], over[place]) for place in places],
            ),
        ],
        panels=[_panel(found, places, level_s)],
        results={
            "points": [group.as_dict() | {"rate_per_s": group.rate_per_s} for group in found],
            "warm_up_s": warm_up_s,
            "at_level": level_results(level_s, at_level, over),
        },
        profiles=[profile_name(settings.device, LLAMA_SHAREGPT.model)],
        units=UNITS
        | {
            "x": "mean think time in seconds",
            "rate_per_s": "conversations that begin in a second",
            "at_level": "requests a second at which the mean normalized latency first exceeds level_s, by "
            f"seed, and its ratio to that of {NO_STATE.name} at the same think time; null for a seed "
            "where it never does",
        },
    )


_COLUMNS = ("system", "think s", "rate", "requests/s", "ms/token", "unanswered")


def _row(group: Group) -> Row:
    return [
        *(group.series, f"{group.x:g}", f"{group.rate_per_s:g}", group.mean("requests_per_s")),
        *(f"{1e3 * group.latency_s:.1f}", group.mean("num_unfinished")),
    ]


def _level_row(place: tuple[str, float], by_seed: BySeed, over: BySeed) -> Row:
    return [place[0], f"{place[1]:g}", in_cell(by_seed), in_cell(over)]


def _curve(groups: list[Group], series: str, think_s: float) -> list[Group]:
    """Return the groups of a curve, sorted by load."""
    of_series = (group for group in groups if (group.series, group.x) == (series, think_s))
    return sorted(of_series, key=lambda group: group.rate_per_s or 0.0)


def _panel(groups: list[Group], places: dict[tuple[str, float], None], level_s: float) -> Panel:
    systems: dict[str, System] = {system.name: system for system in (BOTH_TIERS, NO_STATE)}
    return Panel(
        title="after a long warm-up",
        x_label="requests answered a second",
        y_label="mean ms per output token",
        curves={
            f"{systems[series].label}, {think_s:g} s": [
                (group.mean("requests_per_s"), 1e3 * group.latency_s)
                for group in _curve(groups, series, think_s)
            ]
            for series, think_s in places
        },
        level=1e3 * level_s,
        y_max=_CUT_AT * 1e3 * level_s,
    )


LONG_WARM_UP = Experiment(
    name="fig10b-long",
    title="Llama-2-13B, users who think for 60 and 120 s, after a long warm-up",
    paper=LLAMA_SHAREGPT.paper,
    points=points,
    findings=findings,
)
