"""Statistics of a point over several seeds.

Owns: grouping, means and ratios over seeds, and the part of the JSON document that holds points.
Does not know: what the figures mean.
Called by the experiments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pensieve_lab.experiments.points import Measured

_KEPT = (
    *("num_requests", "num_unfinished", "requests_per_s", "output_tokens_per_s"),
    *("gpu_hit_rate", "cpu_hit_rate", "found_rate", "history_tokens", "recomputed_tokens"),
    *("recompute_s", "history_s", "recompute_share", "wasted_tokens", "num_suspensions"),
    *("swapped_in_bytes", "swapped_out_bytes", "device_busy"),
)
_DIGITS = 6


class Spread(NamedTuple):
    """Mean and range of a figure over seeds."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of values; None without values."""
    return Spread(sum(values) / len(values), min(values), max(values)) if values else None


class Group:
    """The runs of one place in a plot, which differ only by seed.

    Attributes:
      panel, series, x: the place.
      rate_per_s: conversations that begin per second; None as recorded.
      runs: by seed.
    """

    def __init__(self, runs: Sequence[Measured]) -> None:
        """Group `runs`, at least one."""
        first = runs[0].point
        self.panel, self.series, self.x = first.panel, first.series, first.x
        self.rate_per_s = first.workload.rate_per_s
        self.runs = {run.point.seed: run for run in runs}

    def by_seed(self, get: str | Callable[[dict[str, Any]], float]) -> dict[int, float]:
        """Return a figure, by name or by function, of every seed."""
        found = {seed: run.figures for seed, run in self.runs.items()}
        return {seed: one[get] if isinstance(get, str) else get(one) for seed, one in found.items()}

    def values(self, get: str | Callable[[dict[str, Any]], float]) -> list[float]:
        """Return the same values in the order of the seeds."""
        return list(self.by_seed(get).values())

    def mean(self, get: str | Callable[[dict[str, Any]], float]) -> float:
        """Return the mean of a figure over seeds."""
        values = self.values(get)
        return sum(values) / len(values)

    @property
    def latency_s(self) -> float:
        """Mean normalized latency; NaN if a run has no answers."""
        return self.mean(latency_s)

    def as_dict(self) -> dict[str, Any]:
        """Return means for JSON, and the values by seed that curves and comparisons use."""
        return {
            "panel": self.panel,
            "series": self.series,
            "x": self.x,
            **{name: _rounded(self.mean(name)) for name in _KEPT},
            **{name: self._distribution(name) for name in ("normalized_latency_s", "first_token_s")},
            **{
                f"{name}_by_seed": {seed: _rounded(value) for seed, value in self.by_seed(name).items()}
                for name in ("found_rate", "recompute_share", "requests_per_s")
            },
            "latency_s_by_seed": {
                seed: None if math.isnan(value) else _rounded(value)
                for seed, value in self.by_seed(latency_s).items()
            },
        }

    def _distribution(self, name: str) -> dict[str, float] | None:
        """Return the mean over seeds of a figure's mean and percentiles."""
        found = [run.figures[name] for run in self.runs.values()]
        if not all(found):
            return None
        parts = ("mean", "p50", "p90", "p99")
        return {part: _rounded(sum(one[part] for one in found) / len(found)) for part in parts}


def latency_s(figures: dict[str, Any]) -> float:
    """Return the mean normalized latency of a run; NaN without answers."""
    found = figures["normalized_latency_s"]
    return math.nan if found is None else found["mean"]


def groups(measured: Iterable[Measured]) -> list[Group]:
    """Return groups in the order of the points."""
    found: dict[tuple[str, str, float], list[Measured]] = {}
    for one in measured:
        found.setdefault((one.point.panel, one.point.series, one.point.x), []).append(one)
    return [Group(runs) for runs in found.values()]


def _rounded(value: float) -> float:
    """Round to `_DIGITS` digits, so that documents stay small."""
    return float(f"{value:.{_DIGITS}g}")
