"""Crossings of latency-throughput curves with a latency level.

Owns: reading curves at a level, seed by seed, and the result's form in documents and tables.
Does not know: what the curves show, or which level the paper used (`claims`).
Called by `load_sweeps`, `long_warm_up` and `think_time`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pensieve_lab.common.crossing import crossing_at
from pensieve_lab.experiments.seeds import Group, latency_s, spread

type BySeed = Mapping[int, float | None]
"""Requests per second, or a ratio, by seed; None for a seed whose curve never reaches the level."""


def throughputs_at(level_s: float, curve: Sequence[Group]) -> dict[int, float | None]:
    """Return by seed the requests per second at which latency first exceeds the level; None if it never does.

    `curve` is sorted by load, and its groups have the same seeds.
    """
    return {
        seed: crossing_at(level_s, [(run["requests_per_s"], latency_s(run)) for run in runs])
        for seed in curve[0].runs
        for runs in [[group.runs[seed].figures for group in curve]]
    }


def ratios(by_seed: BySeed, base: BySeed) -> dict[int, float | None]:
    """Return the ratio to another curve's values, seed by seed."""
    return {
        seed: None if value is None or (other := base[seed]) is None else value / other
        for seed, value in by_seed.items()
    }


def reached(by_seed: BySeed) -> list[float]:
    """Return the values of the seeds that reach the level."""
    return [value for value in by_seed.values() if value is not None]


def in_cell(by_seed: BySeed) -> str:
    """Return mean and range for a table, with the number of seeds if some do not reach the level."""
    values = reached(by_seed)
    found = spread(values)
    if found is None:
        return "-"
    return str(found) if len(values) == len(by_seed) else f"{found}, {len(values)} of {len(by_seed)} seeds"
