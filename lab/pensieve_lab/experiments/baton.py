"""Baton's tables and figures as experiments, and the paper's statements about them.

Owns: names and texts of these experiments.
Does not know: how one is run.
Called by `experiments.registry`.

Figures 1 to 5 are drawings, so there is nothing to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pensieve_lab.experiments import baton_curves, baton_tables
from pensieve_lab.experiments.settings import Experiment, Findings


def _experiment(name: str, title: str, paper: str, findings: Callable[..., Findings]) -> Experiment:
    found: Any = findings
    return Experiment(
        name=name,
        title=title,
        paper=paper,
        points=lambda _: [],
        findings=found,
        flags=frozenset({"seeds", "small"}),
    )


BATON = (
    _experiment(
        "baton-table1",
        "120 queries with long prompts or long replies, four methods",
        "On an A6000 Benchmark, PD, Baton and Baton-PD take 21,901, 21,781, 20,549 and 11,771 s with 4 in a "
        "batch and doubled sequences, and 6,619, 6,577, 3,424 and 2,654 s with 8: Baton-PD takes 46.25% and "
        "59.90% less than Benchmark, and is 1.75 x and 1.29 x as fast as Baton, which stands for Orca "
        "(section 5.2.1).",
        baton_tables.table1,
    ),
    _experiment(
        "baton-table2",
        "30 short queries by batch size",
        "On a 4090 Benchmark takes 161.77, 92.68, 61.70, 50.07 and 40.45 s with 2 to 10 in a batch, and "
        "Baton 83.43, 49.61, 37.25, 31.08 and 30.99 s: 1.94, 1.89, 1.66, 1.61 and 1.31 x (section 5.2.2).",
        baton_tables.table2,
    ),
    _experiment(
        "baton6",
        "queries completed over time, 30 short queries",
        "Benchmark's curve is a staircase, the more so the larger the batch, and Baton's is less of one "
        "(section 5.2.2).",
        baton_curves.completed,
    ),
    _experiment(
        "baton7",
        "output tokens over time, 30 short queries",
        "Benchmark's rate falls in each batch and starts again with the next, Baton's is steady until the "
        "queue is empty (section 5.2.2).",
        baton_curves.tokens,
    ),
    _experiment(
        "baton8",
        "KV state over time, 30 short queries",
        "Benchmark's memory is a sawtooth; Baton's is as high at its peak, and steadier (section 5.2.2).",
        baton_curves.memory,
    ),
)
