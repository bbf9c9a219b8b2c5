"""Single figures of BatchMaker: 2.3, 2.5, 2.9 and 2.10 of the thesis.

Owns: what is shown in each figure.
Does not know: how cells are scheduled or measured.
Called by `experiments.cells`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_lab.cells import loads, timeline
from pensieve_lab.cells.times import thesis_v100
from pensieve_lab.experiments.cell_sweeps import ORIGIN, europarl, lstm_series, serve_series
from pensieve_lab.experiments.committed import committed_documents
from pensieve_lab.experiments.panels import Curve, Panel
from pensieve_lab.experiments.points import Measured
from pensieve_lab.experiments.settings import Findings, Settings, Table

_THESIS = "the thesis' V100"
_THESIS_BATCHES = (64, 256, 512, 1024, 2048)


def steps(asked: Settings, _: list[Measured]) -> Findings:
    """Return the findings of Figure 2.3: the thesis' numbers and committed measurements."""
    times = thesis_v100().cells_s["lstm"]
    last = max(times)  # above it, time doubles with the batch
    said = [(size, times.get(size, times[last] * size / last)) for size in _THESIS_BATCHES]
    curves: dict[str, Sequence[tuple[int, float]]] = {_THESIS: said}
    documents = {
        name: one
        for name, one in committed_documents("h200_cells_*.json").items()
        if one["benchmark"] == "cells" and one["results"]["model"] == "lstm"
    }
    for one in documents.values():
        curves |= _measured_steps(one)
    rows = [
        [name, size, round(1e6 * took_s, 1), round(size / took_s)]
        for name, curve in curves.items()
        for size, took_s in curve
    ]
    devices = list(dict.fromkeys(one["hardware"]["device"] for one in documents.values()))
    return Findings(
        tables=[Table(title="a step of LSTM", columns=["device", "batch", "us", "rows a second"], rows=rows)],
        panels=[
            _step_panel("time", "microseconds", {k: [(b, 1e6 * s) for b, s in v] for k, v in curves.items()}),
            _step_panel(
                "throughput",
                "thousand rows a second",
                {k: [(b, b / s / 1e3) for b, s in v] for k, v in curves.items()},
            ),
        ],
        results={
            "steps": {name: {str(size): took_s for size, took_s in curve} for name, curve in curves.items()},
            "documents": [f"lab/results/{name}" for name in documents],
        },
        origin=" and ".join([f"{_THESIS}, by its text", *(f"measured on {one}" for one in devices)]),
        units={"steps": "seconds of a step by batch size"},
    )


def _measured_steps(document: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return step times of a `benchmark_cells` document: its longest launches, and baselines."""
    results = document["results"]
    setting = f"hidden size {results['hidden_size']}, {results['dtype']}"
    device = str(document["hardware"]["device"]).removeprefix("NVIDIA ")
    most = max(row["num_tasks"] for row in results["points"])
    found = {
        f"{device}, {setting}": [
            (row["batch_size"], row["task_s"]) for row in results["points"] if row["num_tasks"] == most
        ]
    }
    for row in results.get("peers", ()):
        found.setdefault(f"{row['peer']}, {setting}", []).append((row["batch_size"], row["step_s"]))
    return found


def _step_panel(title: str, y_label: str, curves: Mapping[str, Curve]) -> Panel:
    return Panel(
        title=title,
        x_label="batch size",
        y_label=y_label,
        curves=curves,
        dashed=frozenset({_THESIS}),
        log_x=True,
        log_y=True,
    )


def joining(asked: Settings, _: list[Measured]) -> Findings:
    """Return the findings of Figure 2.5: the requests in each task."""
    runs = {name: timeline.run(make) for name, make in timeline.SYSTEMS.items()}
    tables, panels = [], []
    for name, one in runs.items():
        tasks = [
            [f"{begin_s:g}", " ".join(map(str, numbers)), " ".join(map(str, one.ending(begin_s + 1)))]
            for begin_s, numbers in one.tasks
        ]
        tables.append(Table(title=name, columns=["begins at", "requests", "end with it"], rows=tasks))
        curves = {
            f"request {number} ({length})": [
                (begin_s + 0.5, float(number)) for begin_s, numbers in one.tasks if number in numbers
            ]
            for number, length in enumerate(timeline.LENGTHS, start=1)
        }
        panels.append(
            Panel(title=name, x_label="time, in cells", y_label="request that is in a task", curves=curves)
        )
    rows = [
        [
            number,
            length,
            arrival_s,
            *(f"{one.begin_s[place]:g} to {one.end_s[place]:g}" for one in runs.values()),
        ]
        for place, (number, length, arrival_s) in enumerate(
            zip(range(1, 9), timeline.LENGTHS, timeline.ARRIVALS_S, strict=True)
        )
    ]
    tables.append(Table(title="requests", columns=["request", "cells", "arrives", *runs], rows=rows))
    return Findings(
        tables=tables,
        panels=panels,
        results={
            "runs": {
                name: {
                    "tasks": [[begin_s, list(numbers)] for begin_s, numbers in one.tasks],
                    "end_s": one.end_s.tolist(),
                }
                for name, one in runs.items()
            }
        },
        origin="simulated, a cell a unit of time",
        is_simulated=True,
        units={"runs": "when a task begins and who is in it, and when requests end; in times of a cell"},
    )


def shares(asked: Settings, _: list[Measured]) -> Findings:
    """Return the findings of Figure 2.9: queueing and computation at 5,000 requests a second."""
    rate, panels, rows = 5000, [], []
    found = {
        series.name: [serve_series(series, rate, seed, small=asked.small) for seed in asked.seeds]
        for series in lstm_series(512)
    }
    for what in ("queueing", "computation"):
        curves = {}
        for name, runs in found.items():
            starts = np.concatenate([run.arrival_s if what == "queueing" else run.begin_s for run in runs])
            ends = np.concatenate([run.begin_s if what == "queueing" else run.end_s for run in runs])
            shares = np.arange(1, 100)
            values = 1e3 * np.percentile(ends - starts, shares)
            curves[name] = list(zip(values.tolist(), (shares / 100).tolist(), strict=True))
            rows.append([what, name, *(round(float(values[one - 1]), 2) for one in (50, 90, 99))])
        panels.append(
            Panel(title=what, x_label=f"ms of {what}", y_label="share of requests", curves=curves, y_max=1.0)
        )
    columns = ["part", "system", "p50, ms", "p90, ms", "p99, ms"]
    return Findings(
        tables=[Table(title=f"{rate} requests a second", columns=columns, rows=rows)],
        panels=panels,
        results={"rate": rate, "rows": [dict(zip(columns, row, strict=True)) for row in rows]},
        origin=ORIGIN,
        is_simulated=True,
        units=loads.UNITS,
    )


def lengths_of_sentences(asked: Settings, _: list[Measured]) -> Findings:
    """Return the findings of Figure 2.10."""
    lengths = np.array(europarl(100_000, asked.seeds[0]))
    points = sorted({*range(1, 101), *range(100, 331, 10)})
    curve = [(float(one), float((lengths <= one).mean())) for one in points]
    rows = [
        ["mean", round(float(lengths.mean()), 2)],
        ["share below 100", round(float((lengths < 100).mean()), 4)],
        ["largest", int(lengths.max())],
    ]
    return Findings(
        tables=[Table(title="100,000 lengths", columns=["what", "words"], rows=rows)],
        panels=[
            Panel(
                title="lengths like Europarl's",
                x_label="words",
                y_label="share of sentences",
                curves={"ours": curve},
                y_max=1.0,
            )
        ],
        results={"rows": {str(what): words for what, words in rows}, "curve": curve},
        origin="drawn from a lognormal law of the thesis' figures",
        units={"curve": "words, share of sentences that have no more"},
    )
