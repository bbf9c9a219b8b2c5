"""Eviction policies on the paper's workload (its Figure 14 and Table 3).

Owns: loads, memory sizes, and the comparison of recomputation between policies.
Does not know: the policies' code. `retention` is the paper's policy, `conversation` that of CachedAttention,
and `trailing` that of prefix-matching caches; `lru` differs from `retention` only by ignoring costs, and
`learned` begins as `retention`.
Called by `experiments.registry` and `recorded_traces`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pensieve_jax.config import POLICIES
from pensieve_lab.experiments.machines import memory_bytes, profile_name
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.points import UNITS, Measured, Point
from pensieve_lab.experiments.seeds import Group, Spread, groups
from pensieve_lab.experiments.settings import Experiment, Findings, Row, Settings, Table
from pensieve_lab.experiments.systems import BOTH_TIERS, System, engine, memory_of_tokens
from pensieve_lab.experiments.workloads import Workload
from pensieve_lab.workload import ExponentialThink

# the model with the larger KV cache, so that both tiers fill up at loads that can be served
MODEL = "opt-13b"
_RATES_PER_S = {"a100": (0.5, 0.6, 0.7), "h200": (0.6, 0.8, 1.0)}
_CPU_GB = {"a100": (60, 120, 180), "h200": (120, 240, 360)}
_RATE_OF_SIZES_PER_S = {"a100": 0.45, "h200": 0.8}
# Little memory, from far too small for the load to nearly large enough.
_SMALL_GPU_TOKENS, _SMALL_CPU_TOKENS = 16_384, (40_000, 70_000, 100_000)
_SMALL_RATE_PER_S, _SMALL_THINK_S = 0.4, 20.0
_MAX_CONTEXT_TOKENS = 16_384
LOADS, SIZES = "loads", "sizes of host memory"


def by_policy(system: System) -> list[System]:
    """Return a system for each policy, named after it."""
    return [dataclasses.replace(system, name=policy, policy=policy) for policy in POLICIES]


def retention_over(groups: Sequence[Group]) -> list[tuple[str, float, str, Spread]]:
    """Return (panel, x, policy, retention's recompute share over the policy's) where that is defined.

    The mean is the ratio of means, which weights seeds by how much they recompute; the range is over seeds.
    """
    by_place = {(group.panel, group.x, group.series): group for group in groups}
    compared = []
    for (panel, x, policy), group in by_place.items():
        retention = by_place[panel, x, "retention"]
        pairs = zip(retention.values("recompute_share"), group.values("recompute_share"), strict=True)
        ratios = [of_retention / share for of_retention, share in pairs if share]
        if policy != "retention" and ratios:
            mean = retention.mean("recompute_share") / group.mean("recompute_share")
            compared.append((panel, x, policy, Spread(mean, min(ratios), max(ratios))))
    return compared


def points(settings: Settings) -> list[Point]:
    """Return the points of all policies over loads, and over sizes of host memory."""
    device = settings.device
    if settings.small:
        return [
            _point(
                settings,
                policy,
                SIZES,
                memory[1] / 1e9,
                _SMALL_RATE_PER_S,
                memory,
                seed,
            )
            for cpu_tokens in _SMALL_CPU_TOKENS
            for memory in [memory_of_tokens(device, MODEL, _SMALL_GPU_TOKENS, cpu_tokens)]
            for policy in by_policy(BOTH_TIERS)
            for seed in settings.seeds
        ]
    gpu_bytes, _ = both = memory_bytes(MODEL)
    places = [(LOADS, rate, rate, both) for rate in _RATES_PER_S[device]]
    places += [
        (SIZES, cpu_gb, _RATE_OF_SIZES_PER_S[device], (gpu_bytes, cpu_gb * 10**9))
        for cpu_gb in _CPU_GB[device]
    ]
    return [
        _point(settings, policy, panel, x, rate, memory, seed)
        for panel, x, rate, memory in places
        for policy in by_policy(BOTH_TIERS)
        for seed in settings.seeds
    ]


def _point(
    settings: Settings,
    policy: System,
    panel: str,
    x: float,
    rate_per_s: float,
    memory: tuple[int, int],
    seed: int,
) -> Point:
    small = settings.small
    return Point(
        panel=panel,
        series=policy.name,
        x=x,
        seed=seed,
        device=settings.device,
        model=MODEL,
        engine=engine(
            policy, settings.device, MODEL, memory_bytes=memory, max_context_tokens=_MAX_CONTEXT_TOKENS
        ),
        workload=Workload(
            shape="sharegpt",
            max_context_tokens=_MAX_CONTEXT_TOKENS,
            rate_per_s=rate_per_s,
            think=ExponentialThink(_SMALL_THINK_S if small else 60.0),
            mid_life_s=1600.0 if small else 4800.0,
            warm_up_s=60.0 if small else 240.0,
            window_s=120.0 if small else 360.0,
        ),
    )


def findings(settings: Settings, measured: list[Measured]) -> Findings:
    """Return hit rates and recomputation of all policies, compared with LRU and with retention."""
    found = groups(measured)
    compared = retention_over(found)
    panels = dict.fromkeys(group.panel for group in found)
    x_labels = {LOADS: "conversations that begin in a second", SIZES: "GB of host memory"}
    return Findings(
        tables=[
            Table(title="Policies", columns=COLUMNS, rows=[row_of(group) for group in found]),
            Table(
                title=RETENTION_OVER,
                columns=["panel", "x", "policy", "retention / policy"],
                rows=[[panel, f"{x:g}", policy, str(ratio)] for panel, x, policy, ratio in compared],
            ),
            Table(
                title="Retention beside LRU, as the paper compares them",
                columns=["panel", "x", "cpu hits, points", "recomputed tokens a history token"],
                rows=_beside_lru(found),
            ),
        ],
        panels=[policy_panel(found, panel, x_labels[panel]) for panel in panels],
        results={
            "points": [group.as_dict() for group in found],
            "retention_over": [
                {"panel": panel, "x": x, "policy": policy, **ratio._asdict()}
                for panel, x, policy, ratio in compared
            ],
        },
        profiles=[profile_name(settings.device, MODEL)],
        units=UNITS | {"x": "by panel", "retention_over": "recompute_share of retention / of the policy"},
    )


RETENTION_OVER = "Recompute share of retention over that of another policy, of means, and range over seeds"
COLUMNS = (
    *("panel", "x", "policy", "requests/s", "ms/token", "gpu hits", "cpu hits", "recomputed"),
    *("recompute s", "share"),
)


def row_of(group: Group) -> Row:
    """Return the row of one policy at one place, with means over seeds."""
    return [
        *(group.panel, f"{group.x:g}", group.series),
        *(group.mean("requests_per_s"), f"{1e3 * group.latency_s:.1f}"),
        *(group.mean("gpu_hit_rate"), group.mean("cpu_hit_rate")),
        *(round(group.mean("recomputed_tokens")), group.mean("recompute_s"), group.mean("recompute_share")),
    ]


def policy_panel(groups: Sequence[Group], panel: str, x_label: str, *, log_x: bool = False) -> Panel:
    """Return a panel of recompute shares by policy."""
    return Panel(
        title=panel,
        x_label=x_label,
        y_label="recompute seconds, share of stateless",
        curves={
            policy: sorted(
                (group.x, group.mean("recompute_share"))
                for group in groups
                if (group.panel, group.series) == (panel, policy)
            )
            for policy in POLICIES
        },
        log_x=log_x,
    )


def _beside_lru(groups: Sequence[Group]) -> list[Row]:
    by_place = {(group.panel, group.x, group.series): group for group in groups}
    rows: list[Row] = []
    for (panel, x, policy), group in by_place.items():
        if policy == "lru":
            retention = by_place[panel, x, "retention"]
            points_more = 100 * (retention.mean("cpu_hit_rate") - group.mean("cpu_hit_rate"))
            tokens = (one.mean(lambda f: 1 - f["found_rate"]) for one in (retention, group))
            rows.append([panel, f"{x:g}", f"{points_more:+.1f}", _change(*tokens)])
    return rows


def _change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f}%" if base else "-"


EVICTION = Experiment(
    name="fig14",
    title="Eviction policies",
    paper="Against LRU, from about 3 requests a second on: CPU hit rates up to 4.4 points higher, and up to "
    "14.6% fewer tokens recomputed. Of the systems in Table 3, Pensieve alone drops from the leading end.",
    points=points,
    findings=findings,
)
