"""Means of the study's runs, and per-seed ratios to plain consistent hashing.

Owns: those, and the order of rules in tables.
Does not know: how the runs were made or are shown.
Called by `balance_study.pictures` and the page of the study.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

RULES = ("hash", "bounded", "least-tokens", "state-aware", "placed", "named", "migrating")
BASE = "hash"


def with_named(runs_of: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return all rules on all loads, which the parts `loads` and `named` hold together."""
    return [*runs_of("loads"), *runs_of("named")]


def rows_of(runs: Iterable[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    """Return the runs with these values, sorted by seed."""
    found = [row for row in runs if all(row[name] == value for name, value in values.items())]
    return sorted(found, key=lambda row: row["seed"])


def value_of(row: dict[str, Any], *path: str) -> float:
    """Return the figure of a run at a path of keys."""
    found: Any = row
    for name in path:
        found = found[name]
    return float(found)


def mean_of(rows: list[dict[str, Any]], *path: str) -> float:
    """Return the mean of a figure over seeds; NaN for no rows."""
    return sum(value_of(row, *path) for row in rows) / len(rows) if rows else math.nan


def ratios(rows: list[dict[str, Any]], bases: list[dict[str, Any]], *path: str) -> list[float]:
    """Return the ratio of each run's figure to that of the base run with the same seed."""
    pairs = zip(rows, bases, strict=True)
    return [value_of(row, *path) / value_of(base, *path) for row, base in pairs]


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))
