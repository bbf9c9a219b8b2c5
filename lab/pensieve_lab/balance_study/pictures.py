"""Figures of lab/docs/balance.md, drawn from the study's result documents.

Owns: what each figure shows.
Does not know: how the runs were made, or how curves are drawn (`experiments.panels`).
Called by `programs.study_balance`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pensieve_lab.balance_study.summary import RULES, mean_of, rows_of, with_named
from pensieve_lab.experiments.panels import Panel, draw_panels

_CHANGES = "0 nothing, 1 death, back by its name, 2 by another, 3 drain, 4 join"


def draw_all(results: Path, folder: Path) -> None:
    """Draw all figures into `folder`; raises OSError if a document is missing."""

    def runs_of(part: str) -> list[dict[str, Any]]:
        text = (results / f"balance_{part}.json").read_text(encoding="utf-8")
        runs: list[dict[str, Any]] = json.loads(text)["results"]["runs"]
        return runs

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "loads": _loads(with_named(runs_of)),
        "sizes": _sizes(runs_of("sizes")),
        "changes": _changes(runs_of("changes")),
        "fronts": _fronts(runs_of("fronts")),
    }
    for name, (panels, title) in drawn.items():
        draw_panels(panels, title, folder / f"{name}.png")


def _loads(runs: list[dict[str, Any]]) -> tuple[list[Panel], str]:
    """Plot p99 latency against the share of recomputed tokens; a rule is one point, the mean over seeds."""
    panels = []
    for load in dict.fromkeys(row["load"] for row in runs):
        curves = {}
        for rule in RULES:
            found = rows_of(runs, load=load, level="near the knee", rule=rule)
            curves[rule] = [
                (1e2 * mean_of(found, "recomputed_share"), 1e3 * mean_of(found, "latency_s", "p99"))
            ]
        panels.append(
            Panel(
                title=load,
                x_label="history tokens computed again, %",
                y_label="p99, ms a token",
                curves=curves,
                log_y=True,
            )
        )
    return panels, "Near the knee, eight replicas: lower left is better; means over seeds"


def _sizes(runs: list[dict[str, Any]]) -> tuple[list[Panel], str]:
    counts = sorted({row["num_replicas"] for row in runs})
    rules = list(dict.fromkeys(row["rule"] for row in runs))
    panels = []
    for label, path, scale in (
        ("p99 of the first token, s", ("first_token_s", "p99"), 1.0),
        ("p99, ms a token", ("latency_s", "p99"), 1e3),
        ("busiest replica / mean", ("imbalance",), 1.0),
    ):
        curves = {
            rule: [(n, scale * mean_of(rows_of(runs, rule=rule, num_replicas=n), *path)) for n in counts]
            for rule in rules
        }
        panels.append(Panel(title=label, x_label="replicas", y_label=label, curves=curves, log_x=True))
    return panels, "Mooncake near the knee, as much load for each replica; means over seeds"


def _changes(runs: list[dict[str, Any]]) -> tuple[list[Panel], str]:
    kinds = list(dict.fromkeys(row["change"] for row in runs))
    panels = []
    for load in dict.fromkeys(row["load"] for row in runs):
        for label, path, scale in (
            ("p99 of the first token, s", ("after", "first_token_s", "p99"), 1.0),
            ("history tokens computed again, %", ("after", "recomputed_share"), 1e2),
        ):
            curves = {
                rule: [
                    (number, scale * mean_of(rows_of(runs, load=load, rule=rule, change=kind), *path))
                    for number, kind in enumerate(kinds)
                ]
                for rule in dict.fromkeys(row["rule"] for row in rows_of(runs, load=load))
            }
            panels.append(Panel(title=load, x_label=_CHANGES, y_label=label, curves=curves))
    return panels, "The minute after a change to one of eight replicas; means over seeds"


def _fronts(runs: list[dict[str, Any]]) -> tuple[list[Panel], str]:
    rules = list(dict.fromkeys(row["rule"] for row in runs))
    ages = [
        row["fronts"] for row in runs if row["fronts"].startswith("4 fronts, ") and "any" not in row["fronts"]
    ]
    names = list(dict.fromkeys(ages))
    curves = {
        rule: [
            (
                float(name.removeprefix("4 fronts, ").removesuffix(" s")),
                1e3 * mean_of(rows_of(runs, rule=rule, fronts=name), "latency_s", "p99"),
            )
            for name in names
        ]
        for rule in rules
    }
    panel = Panel(
        title="Mooncake near the knee, four fronts",
        x_label="age of the loads, s (up to twice as old)",
        y_label="p99, ms a token",
        curves=curves,
    )
    return [panel], "What old loads cost; means over seeds"
