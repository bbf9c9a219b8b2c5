"""The study's runs as means and as ratios to the plain hash, seed by seed.

Owns: those, and the order of rules in tables.
Does not know: how anything was run or is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

RULES = ("hash", "bounded", "least-tokens", "state-aware", "placed", "named", "migrating")
BASE = "hash"


def with_named(runs_of: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All rules on all loads, which are two parts."""
    return [*runs_of("loads"), *runs_of("named")]


def rows_of(runs: Iterable[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    """Those runs that have these values, by seed."""
    found = [row for row in runs if all(row[name] == value for name, value in values.items())]
    return sorted(found, key=lambda row: row["seed"])


def value_of(row: dict[str, Any], *path: str) -> float:
    """A figure of a run."""
    found: Any = row
    for name in path:
        found = found[name]
    return float(found)


def mean_of(rows: list[dict[str, Any]], *path: str) -> float:
    """Over seeds; NaN of none."""
    return sum(value_of(row, *path) for row in rows) / len(rows) if rows else math.nan


def ratios(rows: list[dict[str, Any]], bases: list[dict[str, Any]], *path: str) -> list[float]:
    """Of runs to those of the same seeds."""
    pairs = zip(rows, bases, strict=True)
    return [value_of(row, *path) / value_of(base, *path) for row, base in pairs]


def geometric_mean(values: list[float]) -> float:
    """Of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))
