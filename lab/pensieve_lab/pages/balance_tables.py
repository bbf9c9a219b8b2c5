"""Markdown tables of `lab/docs/balance.md`, made from the study's documents.

Owns: which figures stand in which table.
Does not know: how they were measured.
Called by `programs.refresh_pages`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from pensieve_lab.balance_study.loads import HELD_OUT
from pensieve_lab.balance_study.summary import (
    BASE,
    RULES,
    geometric_mean,
    mean_of,
    ratios,
    rows_of,
    with_named,
)
from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.pages.paper_tables import markdown

_P99S = {"ms/token": ("latency_s", "p99"), "first token": ("first_token_s", "p99")}
_CHANGES: Final = {"none": "none", "death, back by its name": "death", "drain": "drain", "join": "join"}
"""Columns of changes. A replica that returns by another name only moves more turns later."""


@lru_cache(maxsize=8)
def _runs(part: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = committed_document(f"balance_{part}.json")["results"]["runs"]
    return runs


def _names(runs: list[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in runs))


def _ratio(rows: list[dict[str, Any]], bases: list[dict[str, Any]], *path: str) -> str:
    found = ratios(rows, bases, *path)
    return f"{geometric_mean(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def verdict() -> str:
    """Return geometric means of ratios over held-out traces, levels and seeds."""
    runs, body = with_named(_runs), []
    for rule in RULES:
        cells = [rule]
        for level in _names(runs, "level"):
            for path in _P99S.values():
                found = []
                for load in HELD_OUT:
                    bases = rows_of(runs, load=load, level=level, rule=BASE)
                    found += ratios(rows_of(runs, load=load, level=level, rule=rule), bases, *path)
                cells.append(f"{geometric_mean(found):.2f}")
        body.append(cells)
    columns = [f"{name}, {level}" for level in _names(runs, "level") for name in _P99S]
    return markdown(["rule", *columns], body)


def loads() -> str:
    """Return p99 latencies relative to the plain hash, load by load."""
    runs, body = with_named(_runs), []
    for load in _names(runs, "load"):
        for level in _names(runs, "level"):
            bases = rows_of(runs, load=load, level=level, rule=BASE)
            cells = [f"{load}, {level}", f"{1e3 * mean_of(bases, 'latency_s', 'p99'):,.0f}"]
            for rule in RULES[1:]:
                cells.append(
                    _ratio(rows_of(runs, load=load, level=level, rule=rule), bases, "latency_s", "p99")
                )
            body.append(cells)
    return markdown(["load", "hash, ms/token", *RULES[1:]], body)


def changes() -> str:
    """Return p99 latencies and recomputation in the minute after a change, or without one."""
    runs, body = _runs("changes"), []
    for load in _names(runs, "load"):
        for rule in _names(rows_of(runs, load=load), "rule"):
            found = (rows_of(runs, load=load, change=change, rule=rule) for change in _CHANGES)
            body.append([load, rule, *(_p99_and_again(rows, "after") for rows in found)])
    return markdown(["load", "rule", *_CHANGES.values()], body)


def fronts() -> str:
    """Return p99 latencies by age of loads and number of front ends."""
    runs = _runs("fronts")
    rules = _names(runs, "rule")
    body = [
        [name, *(_p99_and_again(rows_of(runs, fronts=name, rule=rule)) for rule in rules)]
        for name in _names(runs, "fronts")
    ]
    return markdown(["fronts, age of loads", *rules], body)


def _p99_and_again(rows: list[dict[str, Any]], *part: str) -> str:
    again = 1e2 * mean_of(rows, *part, "recomputed_share")
    return f"{1e3 * mean_of(rows, *part, 'latency_s', 'p99'):,.0f} ({again:.0f}%)"


def sizes() -> str:
    """Return p99 latencies and imbalance by the number of replicas."""
    runs = _runs("sizes")
    rules, body = _names(runs, "rule"), []
    for count in _names(runs, "num_replicas"):
        cells = [f"{count}"]
        for rule in rules:
            rows = rows_of(runs, num_replicas=count, rule=rule)
            cells.append(f"{1e3 * mean_of(rows, 'latency_s', 'p99'):,.0f} ({mean_of(rows, 'imbalance'):.2f})")
        body.append(cells)
    return markdown(["replicas", *rules], body)


def outline() -> str:
    """Return figures of the replica model `FluidReplica`, compared with the engine's own scheduler."""
    body = [*_beside(_runs("outline"), ""), *_beside(_runs("engine"), ", longer")]
    columns = [
        f"{name}{kind}"
        for name in ("p50, ms/token", "p99, ms/token", "recomputed")
        for kind in (", engine", ", outline")
    ]
    return markdown(["load", "rule", "turns", *columns], body)


def _beside(runs: list[dict[str, Any]], suffix: str) -> list[list[str]]:
    body = []
    for load in _names(runs, "load"):
        for rule in _names(runs, "rule"):
            pair = [rows_of(runs, load=load, rule=rule, replica=r) for r in ("engine", "outline")]
            body.append(
                [
                    f"{load}{suffix}",
                    rule,
                    f"{mean_of(pair[0], 'num_turns'):,.0f}",
                    *(f"{1e3 * mean_of(rows, 'latency_s', 'p50'):.1f}" for rows in pair),
                    *(f"{1e3 * mean_of(rows, 'latency_s', 'p99'):,.0f}" for rows in pair),
                    *(f"{1e2 * mean_of(rows, 'recomputed_share'):.1f}%" for rows in pair),
                ]
            )
    return body


TABLES: Final[dict[str, Callable[[], str]]] = {
    "balance-verdict": verdict,
    "balance-loads": loads,
    "balance-changes": changes,
    "balance-fronts": fronts,
    "balance-sizes": sizes,
    "balance-outline": outline,
}
"""Tables by their name in the page."""
