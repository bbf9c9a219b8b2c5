"""Where a curve of latency over throughput crosses a level.

Owns: reading curves at a level, seed by seed.
Does not know: what the curves are of.
Called by: `load_sweeps`, `think_time`.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.crossing import crossing_at

from experiments.seeds import Group, latency_s


def throughputs_at(level_s: float, curve: Sequence[Group]) -> dict[int, float]:
    """Requests a second where latency first exceeds the level, by seed.

    Seeds where it never does are left out. `curve`: by load, all of the same seeds.
    """
    found = {}
    for seed in curve[0].runs:
        runs = [group.runs[seed].figures for group in curve]
        crossing = crossing_at(level_s, [(run["requests_per_s"], latency_s(run)) for run in runs])
        if crossing is not None:
            found[seed] = crossing
    return found
