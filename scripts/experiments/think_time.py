"""Users who think for longer: the paper's Figure 15.

Owns: think times and loads of that experiment.
Does not know: how curves are read at a level (`levels`).
Called by: the registry.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.levels import throughputs_at
from experiments.machines import profile_name
from experiments.panels import Panel
from experiments.paper_sweeps import OPT_SHAREGPT
from experiments.points import UNITS, Measured, Point
from experiments.seeds import Group, groups, spread
from experiments.settings import Experiment, Findings, Settings, Table
from experiments.systems import BOTH_TIERS, ONE_TIER, System, context_tokens_of_paper, engine_of_paper
from experiments.workloads import Workload
from pensieve_jax.workload import ExponentialThink

_SYSTEMS = (BOTH_TIERS, ONE_TIER)  # to the stateless one, think times change nothing but who comes when
_MODEL = OPT_SHAREGPT.model
_THINK_S = (30, 60, 120, 300, 600)
_RATES_PER_S = {"a100": (0.15, 0.25, 0.35, 0.45, 0.55, 0.65), "h200": (0.5, 0.8, 1.1, 1.4)}
_ONE_TIER_UNTIL_PER_S = {"a100": 0.45, "h200": 1.1}
_SMALL_THINK_S = (10, 40, 160)
_SMALL_RATES_PER_S = (0.2,)
_LIVES = 80  # mean think times of mid-life, as in Figure 10: the longest conversations have 67 turns


def points(settings: Settings) -> list[Point]:
    """Systems by think time, over loads."""
    return [
        _point(settings, system, think_s, rate, seed)
        for system in _SYSTEMS
        for think_s in (_SMALL_THINK_S if settings.small else _THINK_S)
        for rate in _rates(settings, system)
        for seed in settings.seeds
    ]


def _rates(settings: Settings, system: System) -> Sequence[float]:
    """From below the level of latency to above it, for either system."""
    if settings.small:
        return _SMALL_RATES_PER_S
    until = _ONE_TIER_UNTIL_PER_S[settings.device]
    return [rate for rate in _RATES_PER_S[settings.device] if system.has_host_tier or rate <= until]


def _point(settings: Settings, system: System, think_s: float, rate: float, seed: int) -> Point:
    device, small = settings.device, settings.small
    return Point(
        panel=f"{rate:g} conversations a second",
        series=system.name,
        x=think_s,
        seed=seed,
        device=device,
        model=_MODEL,
        engine=engine_of_paper(system, device, _MODEL, small=small),
        workload=Workload(
            shape=OPT_SHAREGPT.shape,
            max_context_tokens=context_tokens_of_paper(small=small),
            rate_per_s=rate,
            think=ExponentialThink(think_s),
            mid_life_s=_LIVES * think_s,
            warm_up_s=10.0 if small else 90.0,
            window_s=40.0 if small else 240.0,
        ),
    )


def findings(settings: Settings, measured: list[Measured]) -> Findings:
    """Hits by think time at each load, and throughput at a level of latency."""
    found = groups(measured)
    level_s = OPT_SHAREGPT.level_s[settings.device]
    at_level = {
        (system.name, think_s): throughputs_at(level_s, _curve(found, system.name, think_s))
        for system in _SYSTEMS
        for think_s in sorted({group.x for group in found})
    }
    level = f"{1e3 * level_s:g} ms per token"
    return Findings(
        tables=[
            Table(title="By think time", columns=_COLUMNS, rows=[_row(group) for group in found]),
            Table(
                title=f"Requests a second at {level}, mean and range over seeds",
                columns=["system", "think s", "requests/s"],
                rows=[
                    [name, f"{think_s:g}", str(spread(list(by_seed.values())) or "-")]
                    for (name, think_s), by_seed in at_level.items()
                ],
            ),
        ],
        panels=_panels(found, at_level, f"at {level}"),
        results={
            "points": [group.as_dict() for group in found],
            "at_level": [
                {"system": name, "think_s": think_s, "level_s": level_s, "requests_per_s_by_seed": by_seed}
                for (name, think_s), by_seed in at_level.items()
            ],
        },
        profiles=[profile_name(settings.device, _MODEL)],
        units=UNITS | {"x": "mean think time in seconds"},
    )


_COLUMNS = ("system", "think s", "rate", "requests/s", "ms/token", "gpu hits", "cpu hits", "share")


def _row(group: Group) -> list[object]:
    return [
        *(group.series, f"{group.x:g}", f"{group.rate_per_s:g}", group.mean("requests_per_s")),
        f"{1e3 * group.latency_s:.1f}",
        *(group.mean(name) for name in ("gpu_hit_rate", "cpu_hit_rate", "recompute_share")),
    ]


def _curve(found: Sequence[Group], series: str, think_s: float) -> list[Group]:
    """By load."""
    of_series = (group for group in found if (group.series, group.x) == (series, think_s))
    return sorted(of_series, key=lambda group: group.rate_per_s or 0.0)


def _panels(
    found: Sequence[Group], at_level: dict[tuple[str, float], dict[int, float]], level: str
) -> list[Panel]:
    busiest = max(
        (group for group in found if group.series == ONE_TIER.name), key=lambda group: group.rate_per_s or 0.0
    ).panel
    x_label = "mean think time in seconds"
    return [
        Panel(
            title=level,
            x_label=x_label,
            y_label="requests answered a second",
            curves={
                system.name: [
                    (think_s, sum(by_seed.values()) / len(by_seed))
                    for (name, think_s), by_seed in at_level.items()
                    if name == system.name and by_seed
                ]
                for system in _SYSTEMS
            },
            log_x=True,
        ),
        Panel(
            title=busiest,
            x_label=x_label,
            y_label="share of history tokens found",
            curves={
                system.name: [
                    (group.x, group.mean("found_rate"))
                    for group in found
                    if (group.panel, group.series) == (busiest, system.name)
                ]
                for system in _SYSTEMS
            },
            log_x=True,
        ),
    ]


THINK_TIME = Experiment(
    name="fig15",
    title="Mean think times from 30 to 600 seconds",
    paper="Throughput falls as users think for longer, from 60 to 600 s on average: less history is found.",
    points=points,
    findings=findings,
)
