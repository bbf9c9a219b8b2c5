"""Latency over throughput as the load rises: the paper's Figures 10, 11 and 13, and the thesis's 3.15.

Owns: how a sweep over loads becomes points, tables and curves, and how curves are read at a level.
Does not know: which sweeps there are.
Called by `paper_sweeps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pensieve_lab.experiments.levels import in_cell, ratios, throughputs_at
from pensieve_lab.experiments.machines import profile_name
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.points import UNITS, Measured, Point
from pensieve_lab.experiments.seeds import Group, groups, latency_s
from pensieve_lab.experiments.settings import Experiment, Findings, Row, Settings, Table
from pensieve_lab.experiments.systems import THREE_SYSTEMS, System, context_tokens_of_paper, engine_of_paper
from pensieve_lab.experiments.workloads import Workload
from pensieve_lab.workload import ExponentialThink

_CUT_AT = 2.5  # a curve is drawn up to this multiple of the level
# As long as the longest conversations take: 67 turns ShareGPT-like and 34 UltraChat-like, with 60 s of think
# time and 6 to 8 s of answer per turn. Few conversations are that long, but they have the longest histories.
_MID_LIFE_S = {"sharegpt": 4800.0, "ultrachat": 2400.0}
# Conversations in mid-life start without a KV cache, so the warm-up lasts until nearly all of them have
# returned: after four mean think times, all but 2%.
_WARM_UP_S, _WINDOW_S = 240.0, 240.0
_THINK_S, _SMALL_THINK_S = 60.0, 10.0


@dataclass(frozen=True, kw_only=True)
class LoadPanel:
    """One model and dataset of a sweep.

    Attributes:
      title: of the panel.
      model, shape: a preset, and the distribution of conversations.
      rates_per_s: conversations that begin per second, by device.
      level_s: the normalized latency at which throughputs are compared, by device.
      one_tier_until_per_s: by device, the last rate at which systems without host memory are simulated, since
        they are far beyond the level there. A device that is left out uses all rates.
      min_turns: shorter conversations are left out.
      paper: the paper's throughput ratios at its own level, as text; empty if it gives none.
    """

    title: str
    model: str
    shape: str
    rates_per_s: Mapping[str, Sequence[float]]
    level_s: Mapping[str, float]
    one_tier_until_per_s: Mapping[str, float] = field(default_factory=dict)
    min_turns: int = 1
    paper: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadSweep:
    """Systems over panels.

    Attributes:
      panels: what is swept.
      systems: the compared systems; ratios are to the last one.
      small_rates_per_s: of the small version, from idle to overloaded.
    """

    panels: Sequence[LoadPanel]
    systems: Sequence[System] = THREE_SYSTEMS
    small_rates_per_s: Sequence[float] = (0.3, 0.7, 1.1)

    def points(self, settings: Settings) -> list[Point]:
        """Return a point for every panel, system, rate and seed."""
        return [
            self._point(settings, panel, system, rate, seed)
            for panel in self.panels
            for system in self.systems
            for rate in self._rates(settings, panel, system)
            for seed in settings.seeds
        ]

    def findings(self, settings: Settings, measured: list[Measured]) -> Findings:
        """Return the curves, and the throughputs at the level."""
        found = groups(measured)
        levels = [level for panel in self.panels for level in self._levels(settings, panel, found)]
        return Findings(
            tables=[
                Table(title="Load", columns=_LOAD_COLUMNS, rows=[_load_row(group) for group in found]),
                Table(
                    title="Requests a second at a mean normalized latency, mean and range over seeds",
                    columns=["panel", "system", "ms/token", "requests/s", f"x {self._base}", "paper"],
                    rows=[_level_row(level) for level in levels],
                ),
            ],
            panels=[self._panel(settings, panel, found) for panel in self.panels],
            results={"points": [group.as_dict() for group in found], "at_level": levels},
            profiles=[profile_name(settings.device, panel.model) for panel in self.panels],
            units=UNITS
            | {
                "x": "conversations that begin in a second",
                "at_level": "requests a second at which the mean normalized latency first exceeds level_s, "
                f"by seed, and its ratio to that of {self._base}; null for a seed where it never does",
            },
        )

    @property
    def _base(self) -> str:
        """Name of the baseline system."""
        return self.systems[-1].name

    def _rates(self, settings: Settings, panel: LoadPanel, system: System) -> Sequence[float]:
        if settings.small:
            return self.small_rates_per_s
        rates = panel.rates_per_s[settings.device]
        until = panel.one_tier_until_per_s.get(settings.device, math.inf)
        return [rate for rate in rates if system.has_host_tier or rate <= until]

    def _point(self, settings: Settings, panel: LoadPanel, system: System, rate: float, seed: int) -> Point:
        device, model, small = settings.device, panel.model, settings.small
        return Point(
            panel=panel.title,
            series=system.name,
            x=rate,
            seed=seed,
            device=device,
            model=model,
            engine=engine_of_paper(system, device, model, small=small),
            workload=Workload(
                shape=panel.shape,
                min_turns=panel.min_turns,
                max_context_tokens=context_tokens_of_paper(small=small),
                rate_per_s=rate,
                think=ExponentialThink(_SMALL_THINK_S if small else _THINK_S),
                mid_life_s=600.0 if small else _MID_LIFE_S[panel.shape],
                warm_up_s=20.0 if small else _WARM_UP_S,
                window_s=30.0 if small else _WINDOW_S,
            ),
        )

    def _levels(self, settings: Settings, panel: LoadPanel, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Return the throughputs at the level of one panel, for JSON."""
        level_s = panel.level_s[settings.device]
        at_level = {
            system.name: throughputs_at(level_s, _curve(groups, panel.title, system.name))
            for system in self.systems
        }
        base = at_level[self._base]
        return [
            {
                "panel": panel.title,
                "system": name,
                "level_s": level_s,
                "requests_per_s_by_seed": by_seed,
                "ratio_by_seed": ratios(by_seed, base),
                "paper": panel.paper if name == self.systems[0].name else "",
            }
            for name, by_seed in at_level.items()
        ]

    def _panel(self, settings: Settings, panel: LoadPanel, groups: Sequence[Group]) -> Panel:
        level_s = panel.level_s[settings.device]
        return Panel(
            title=panel.title,
            x_label="requests answered a second",
            y_label="mean ms per output token",
            curves={
                system.label: [
                    (group.mean("requests_per_s"), 1e3 * group.latency_s)
                    for group in _curve(groups, panel.title, system.name)
                ]
                for system in self.systems
            },
            seeds={
                system.label: [
                    [
                        (
                            group.runs[seed].figures["requests_per_s"],
                            1e3 * latency_s(group.runs[seed].figures),
                        )
                        for group in _curve(groups, panel.title, system.name)
                    ]
                    for seed in settings.seeds
                ]
                for system in self.systems
            },
            level=1e3 * level_s,
            y_max=None if settings.small else _CUT_AT * 1e3 * level_s,
        )


def load_experiment(name: str, title: str, paper: str, sweep: LoadSweep) -> Experiment:
    """Return a sweep as a named experiment."""
    return Experiment(name=name, title=title, paper=paper, points=sweep.points, findings=sweep.findings)


_LOAD_COLUMNS = (
    *("panel", "system", "rate", "requests/s", "tokens/s", "ms/token", "p90", "gpu hits", "cpu hits"),
    *("recompute share", "suspended", "GB in"),
)


def _load_row(group: Group) -> Row:
    p90_s = group.mean(lambda one: one["normalized_latency_s"]["p90"] if one["num_requests"] else math.nan)
    return [
        *(group.panel, group.series, f"{group.x:g}"),
        *(group.mean("requests_per_s"), group.mean("output_tokens_per_s")),
        *(f"{1e3 * group.latency_s:.1f}", f"{1e3 * p90_s:.1f}"),
        *(group.mean(name) for name in ("gpu_hit_rate", "cpu_hit_rate", "recompute_share")),
        *(group.mean("num_suspensions"), group.mean("swapped_in_bytes") / 1e9),
    ]


def _curve(groups: Sequence[Group], panel: str, series: str) -> list[Group]:
    """Return the groups of a series, sorted by load."""
    of_series = (group for group in groups if (group.panel, group.series) == (panel, series))
    return sorted(of_series, key=lambda group: group.x)


def _level_row(level: dict[str, Any]) -> Row:
    cells = [in_cell(level[key]) for key in ("requests_per_s_by_seed", "ratio_by_seed")]
    return [level["panel"], level["system"], f"{1e3 * level['level_s']:g}", *cells, level["paper"]]
