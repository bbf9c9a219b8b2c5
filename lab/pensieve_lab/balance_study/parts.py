"""Parts of the balance study and the rows that they produce.

Owns: the parts: tuning, loads, fleet sizes, membership changes, front ends, and the error of `FluidReplica`
against the engine's own scheduler.
Does not know: how a run is made, or how figures are drawn.
Called by `programs.study_balance`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pensieve_lab.balance_study.loads import (
    COMFORTABLE,
    MADE,
    MOONCAKE,
    NEAR,
    REPORTED,
    TUNING,
    TUNING_SEED,
    Load,
)
from pensieve_lab.balance_study.runs import MakePolicy, RunResult, Scene, figures, policy, run
from pensieve_lab.simulator.fleet import Change, Fronts

type Row = dict[str, Any]

INFINITE = float("inf")
STATE_AWARE = {"others": 1.0, "least_gain_s": 0.0}
CHOSEN: dict[str, MakePolicy] = {
    "hash": policy("hash"),
    "bounded": policy("bounded", bound=1.25),
    "least-tokens": policy("least-tokens"),
    "state-aware": policy("state-aware", **STATE_AWARE),
    "placed": policy("placed", least_gain_s=INFINITE),
    "named": policy("named"),
    "migrating": policy("migrating", high=1.5, smooth_s=30.0),
}
"""All rules with the parameters that the part `tuning` selected."""
_FEW = {name: CHOSEN[name] for name in ("hash", "bounded", "state-aware", "placed", "named")}
_PAIR = {name: CHOSEN[name] for name in ("hash", "named")}
_FLEET = 8
_ENGINE_WINDOW_S = 200.0
_SIZES = (8, 64, 256)
_SIZES_WINDOW_S, _SIZES_WARM_UP_S, _SIZES_MID_LIFE_S, _FRONTS_WINDOW_S = 30.0, 30.0, 600.0, 150.0
_STALENESS_S = (0.0, 0.25, 1.0, 4.0)
_CHANGE_S, _AFTER_S, _REST_S = (
    30.0,
    60.0,
    30.0,
)  # within the window: time of the change, time over which its costs are measured, and the rest
_BACK_S = 60.0  # a dead replica returns after this long


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all parts: trace files by format, seeds, and a progress callback."""

    files: dict[str, Path]
    seeds: Sequence[int]
    say: Callable[[str], None]


def tuning(settings: Settings) -> list[Row]:
    """Run a grid of parameters, on loads and seeds that no reported result uses."""
    grid: dict[str, MakePolicy] = {"hash": policy("hash")}
    grid |= {f"bounded, {c:g}": policy("bounded", bound=c) for c in (1.1, 1.25, 1.5, 2.0)}
    for others, gain in (
        (0.0, 0.2),
        (0.5, 0.2),
        (1.0, 0.0),
        (1.0, 0.2),
        (1.0, 1.0),
        (1.0, INFINITE),
        (2.0, 0.2),
    ):
        name = f"state-aware, {others:g}, {gain:g}"
        grid[name] = policy("state-aware", others=others, least_gain_s=gain)
    grid |= {
        f"state-aware, 1, 0, {count} candidates": policy("state-aware", **STATE_AWARE, num_candidates=count)
        for count in (2, 4)
    }
    for high, smooth_s in ((1.2, 10.0), (1.5, 0.0), (1.5, 10.0), (2.0, 10.0), (1.5, 30.0)):
        grid[f"migrating, {high:g}, {smooth_s:g} s"] = policy("migrating", high=high, smooth_s=smooth_s)
    *made, recorded = TUNING
    return [
        *_runs(settings, made, (NEAR,), (TUNING_SEED,), grid),
        *_runs(settings, (recorded,), (COMFORTABLE, NEAR), (TUNING_SEED, TUNING_SEED + 1), grid),
    ]


def loads(settings: Settings) -> list[Row]:
    """Run every rule except `named` on every load at two levels."""
    rules = {name: rule for name, rule in CHOSEN.items() if name != "named"}
    return list(_runs(settings, REPORTED, (COMFORTABLE, NEAR), settings.seeds, rules))


def named(settings: Settings) -> list[Row]:
    """Run the rule `named`, which was added later, on the sessions of `loads`."""
    rules = {"named": CHOSEN["named"]}
    return list(_runs(settings, REPORTED, (COMFORTABLE, NEAR), settings.seeds, rules))


def sizes(settings: Settings) -> list[Row]:
    """Run fleets of up to 256 replicas with the same load per replica, for a shorter window."""
    rules = {name: CHOSEN[name] for name in ("hash", "placed")}
    short = replace(
        MOONCAKE,
        window_s=_SIZES_WINDOW_S,
        warm_up_s=_SIZES_WARM_UP_S,
        mid_life_s=_SIZES_MID_LIFE_S,
    )
    rows: list[Row] = []
    for count in _SIZES:
        rows += _runs(settings, (short,), (NEAR,), settings.seeds, rules, num_replicas=count)
    return rows


def fronts(settings: Settings) -> list[Row]:
    """Run with stale loads, and with several front ends that do not see each other's turns."""
    views = {f"4 fronts, {age:g} s": Fronts(staleness_s=age) for age in _STALENESS_S}
    views |= {"1 front, 0.25 s": Fronts(count=1), "4 fronts, any, 0.25 s": Fronts(sticky=False)}
    rules = {name: CHOSEN[name] for name in ("hash", "state-aware", "placed", "named")}
    rows: list[Row] = []
    for seed in settings.seeds:
        shorter = replace(MOONCAKE, window_s=_FRONTS_WINDOW_S)
        scene = Scene.of(shorter, settings.files, NEAR, _FLEET, seed)
        for (name, view), (rule, make) in itertools.product(views.items(), rules.items()):
            rows.append(_row(scene, rule, run(scene, make, fronts=view)) | {"fronts": name})
            settings.say(f"{name}: {_summary(rows[-1])}")
    return rows


def changes(settings: Settings) -> list[Row]:
    """Measure the minute after a replica dies, is drained, or joins."""
    rows: list[Row] = []
    for load, level, rules in ((MOONCAKE, COMFORTABLE, _FEW), (MADE, COMFORTABLE, _PAIR)):
        longer = replace(load, window_s=_CHANGE_S + _AFTER_S + _REST_S)
        for seed in settings.seeds:
            scene = Scene.of(longer, settings.files, level, _FLEET, seed)
            for (name, rule), (kind, what) in itertools.product(rules.items(), _changes(longer).items()):
                ran = run(scene, rule, changes=what)
                rows.append(_row(scene, name, ran) | {"change": kind, "after": _after(ran, longer)})
                settings.say(_summary(rows[-1]))
    return rows


def _changes(load: Load) -> dict[str, tuple[Change, ...]]:
    at_s, victim = load.warm_up_s + _CHANGE_S, "replica-3"
    death = Change(at_s, "death", victim)
    return {
        "none": (),
        "death, back by its name": (death, Change(at_s + _BACK_S, "join", victim)),
        "death, back by another": (death, Change(at_s + _BACK_S, "join", "replica-new")),
        "drain": (Change(at_s, "leave", victim),),
        "join": (Change(at_s, "join", "replica-new"),),
    }


def _after(ran: RunResult, load: Load) -> dict[str, Any]:
    """Return the figures of turns that arrived in the minute after the change."""
    begin_s = load.warm_up_s + _CHANGE_S
    arrived = [a for a in ran.answers if begin_s <= a.turn.arrival_s < begin_s + _AFTER_S]
    return figures(arrived, _FLEET)


def outline(settings: Settings) -> list[Row]:
    """Compare the engine's own scheduler with `FluidReplica`, which all other parts use."""
    rows: list[Row] = []
    for load in REPORTED:
        if load.hot_share:
            continue  # the same as without hot roots
        shorter = replace(load, window_s=min(load.window_s, 45.0), warm_up_s=min(load.warm_up_s, 20.0))
        for seed in settings.seeds[:1]:
            scene = Scene.of(shorter, settings.files, NEAR, _FLEET, seed)
            for (name, rule), is_real in itertools.product(_PAIR.items(), (False, True)):
                row = _row(scene, name, run(scene, rule, is_real=is_real))
                rows.append(row | {"replica": "engine" if is_real else "outline"})
                settings.say(f"{rows[-1]['replica']}: {_summary(rows[-1])}")
    return rows


def engine(settings: Settings) -> list[Row]:
    """Compare both replica models on the load with the largest gain, long enough for queues to form."""
    scene = Scene.of(
        replace(MOONCAKE, window_s=_ENGINE_WINDOW_S), settings.files, NEAR, _FLEET, settings.seeds[0]
    )
    rows: list[Row] = []
    for (name, rule), is_real in itertools.product(_PAIR.items(), (False, True)):
        row = _row(scene, name, run(scene, rule, is_real=is_real))
        rows.append(row | {"replica": "engine" if is_real else "outline"})
        settings.say(f"{rows[-1]['replica']}: {_summary(rows[-1])}")
    return rows


PARTS: dict[str, Callable[[Settings], list[Row]]] = {
    "tuning": tuning,
    "loads": loads,
    "named": named,
    "fronts": fronts,
    "changes": changes,
    "sizes": sizes,
    "outline": outline,
    "engine": engine,
}

_LOADS: dict[str, Sequence[Load]] = {
    "tuning": TUNING,
    "loads": REPORTED,
    "named": REPORTED,
    "fronts": (MOONCAKE,),
    "changes": (MOONCAKE, MADE),
    "sizes": (MOONCAKE,),
    "outline": REPORTED,
    "engine": (MOONCAKE,),
}


def formats(names: Sequence[str]) -> set[str]:
    """Return the formats of the trace files that these parts need."""
    return {load.format for name in names for load in _LOADS[name] if load.format is not None}


def _runs(
    settings: Settings,
    loads: Sequence[Load],
    levels: Sequence[str],
    seeds: Sequence[int],
    rules: dict[str, MakePolicy],
    *,
    num_replicas: int = _FLEET,
) -> Iterator[Row]:
    for load, level, seed in itertools.product(loads, levels, seeds):
        scene = Scene.of(load, settings.files, level, num_replicas, seed)
        for name, rule in rules.items():
            row = _row(scene, name, run(scene, rule))
            settings.say(_summary(row))
            yield row


def _row(scene: Scene, rule: str, ran: RunResult) -> Row:
    return {
        "load": scene.load.name,
        "level": scene.level,
        "num_replicas": scene.num_replicas,
        "seed": scene.seed,
        "rule": rule,
        **_rounded(ran.figures),
    }


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _rounded(value)
        if isinstance(value, dict)
        else (float(f"{value:.5g}") if isinstance(value, float) else value)
        for key, value in figures.items()
    }


def _summary(row: Row) -> str:
    latency, first = row["latency_s"], row["first_token_s"]
    return (
        f"{row['load']}, {row['level']}, {row['num_replicas']}, seed {row['seed']}, {row['rule']}"
        f"{', ' + row['change'] if 'change' in row else ''}: {row['num_turns']} turns, ms a token "
        f"{1e3 * latency['p50']:.1f} p99 {1e3 * latency['p99']:.1f}, first p99 {1e3 * first['p99']:.0f} ms, "
        f"recomputed {row['recomputed_share']:.3f}, imbalance {row['imbalance']:.2f}, {row['cpu_s']:.1f} s"
    )
