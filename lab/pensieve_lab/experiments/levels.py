"""Where a curve of latency over throughput crosses a level.

Owns: reading curves at a level, seed by seed, and how that looks in a document and a table.
Does not know: what the curves are of, or which level the paper took (`claims`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pensieve_lab.common.crossing import crossing_at
from pensieve_lab.experiments.seeds import Group, latency_s, spread

type BySeed = Mapping[int, float | None]
"""Requests a second, or a ratio; None for a seed whose curve never reaches the level."""


def throughputs_at(level_s: float, curve: Sequence[Group]) -> dict[int, float | None]:
    """Requests a second where latency first exceeds the level, by seed; None where it never does.

    `curve`: by load, all of the same seeds.
    """
    return {
        seed: crossing_at(level_s, [(run["requests_per_s"], latency_s(run)) for run in runs])
        for seed in curve[0].runs
        for runs in [[group.runs[seed].figures for group in curve]]
    }


def ratios(by_seed: BySeed, base: BySeed) -> dict[int, float | None]:
    """Over another curve's, seed by seed."""
    return {
        seed: None if value is None or (other := base[seed]) is None else value / other
        for seed, value in by_seed.items()
    }


def reached(by_seed: BySeed) -> list[float]:
    """Of the seeds that reach the level."""
    return [value for value in by_seed.values() if value is not None]


def in_cell(by_seed: BySeed) -> str:
    """Mean and range for a table, and of how many seeds where some do not reach the level."""
    values = reached(by_seed)
    found = spread(values)
    if found is None:
        return "-"
    return str(found) if len(values) == len(by_seed) else f"{found}, {len(values)} of {len(by_seed)} seeds"
