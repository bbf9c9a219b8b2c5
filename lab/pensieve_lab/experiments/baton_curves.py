"""Figures 6 to 8 of Baton: progress and KV cache over time.

Owns: what is shown of each run.
Does not know: how a run is made.
Called by `experiments.baton`.

Curves show the first seed; tables show all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_lab.experiments import baton_runs
from pensieve_lab.experiments.panels import Curve, Panel
from pensieve_lab.experiments.settings import Findings, Settings, Table
from pensieve_lab.rebatching.methods import BATON_PD, BENCHMARK
from pensieve_lab.rebatching.simulation import Series

_BATCHES = (2, 4, 6, 8, 10)
_METHODS = (BENCHMARK, BATON_PD)
_NUM_POINTS = 150  # per curve
_MEGABYTE = 1e6
_NAMES = ("time_s", "completed", "tokens", "kv_bytes", "span_bytes")

type Runs = Mapping[tuple[int, str], Sequence[Series]]


def completed(asked: Settings, _: object) -> Findings:
    """Return the findings of Figure 6."""
    return _over_time(asked, "completed", "queries", "queries completed")


def tokens(asked: Settings, _: object) -> Findings:
    """Return the findings of Figure 7."""
    return _over_time(asked, "tokens", "output tokens", "output tokens")


def memory(asked: Settings, _: object) -> Findings:
    """Return the findings of Figure 8.

    It shows the columns that the batch spans, and the allocated memory: whole shapes, and other rows.
    """
    runs = _measure(asked)
    lines = []
    for batch in _BATCHES:
        for name in _METHODS:
            found = runs[batch, name]
            span, allocated = (_mean_and_peak(found, key) for key in ("span_bytes", "kv_bytes"))
            share = f"{span[0] / span[1]:.2f}"
            lines.append([batch, name, *map(round, span), share, *map(round, allocated)])
    columns = [
        *("batch", "method", "span, mean MB", "span, peak MB", "mean over peak"),
        *("allocated, mean MB", "allocated, peak MB"),
    ]
    panels = [
        Panel(
            title=f"{batch} in a batch",
            x_label="seconds",
            y_label="KV state, MB",
            curves={
                f"{name}, {what}": _curve(runs[batch, name][0], key, 1 / _MEGABYTE)
                for name in _METHODS
                for what, key in (("span", "span_bytes"), ("allocated", "kv_bytes"))
            },
        )
        for batch in _BATCHES
    ]
    return _findings(runs, Table(title="KV state", columns=columns, rows=lines), panels)


def _over_time(asked: Settings, key: str, what: str, title: str) -> Findings:
    runs = _measure(asked)
    lines = [
        [batch, name, *(f"{_mean(runs[batch, name], _until(key, share)):.2f}" for share in (0.5, 0.9, 1.0))]
        for batch in _BATCHES
        for name in _METHODS
    ]
    columns = ["batch", "method", *(f"seconds to {share} of them" for share in ("half", "90%", "all"))]
    panels = [
        Panel(
            title=f"{batch} in a batch",
            x_label="seconds",
            y_label=what,
            curves={name: _curve(runs[batch, name][0], key) for name in _METHODS},
        )
        for batch in _BATCHES
    ]
    return _findings(runs, Table(title=title, columns=columns, rows=lines), panels)


def _measure(asked: Settings) -> Runs:
    jobs = [job for batch in _BATCHES for job in baton_runs.jobs_of("table 2", False, batch, _METHODS, asked)]
    runs: dict[tuple[int, str], list[Series]] = {}
    for job in baton_runs.shown(jobs, progress=shows_progress()):
        served = baton_runs.run(job, small=asked.small, records=True)
        assert served.series is not None
        runs.setdefault((job.batch, job.method), []).append(served.series)
    return runs


def _findings(runs: Runs, table: Table, panels: Sequence[Panel]) -> Findings:
    curves = [
        {
            "batch": batch,
            "method": name,
            **{key: [point[1] for point in _curve(found[0], key)] for key in _NAMES},
        }
        for (batch, name), found in runs.items()
    ]
    rows: list[dict[str, Any]] = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return Findings(
        tables=[table],
        panels=panels,
        results={"rows": rows, "curves": curves, "costs": baton_runs.described_costs()},
        origin=baton_runs.origin(),
        is_simulated=True,
        units={
            "time_s": "since the first arrival, virtual; curves are of the first seed, some of their steps",
            "completed, tokens": "that had come by then",
            "kv_bytes": "of device memory: the ring, and rows beside it",
            "span_bytes": "columns between the first that is needed and the cursor, of rows in use",
        },
    )


def _curve(series: Series, key: str, factor: float = 1.0) -> Curve:
    """Return some of a run's steps, including the first and the last."""
    num = len(series.time_s)
    places = np.unique(np.linspace(0, num - 1, min(num, _NUM_POINTS)).astype(int))
    values = getattr(series, key)[places]
    if factor != 1.0:
        values = values * factor
    return list(zip(series.time_s[places].tolist(), values.tolist(), strict=True))


def _mean(series: Sequence[Series], read: Callable[[Series], float]) -> float:
    """Return the mean over seeds."""
    return float(np.mean([read(one) for one in series]))


def _until(key: str, share: float) -> Callable[[Series], float]:
    """Return a function for the time at which this share of the total was reached."""

    def read(series: Series) -> float:
        values = getattr(series, key)
        return float(series.time_s[np.searchsorted(values, share * values[-1])])

    return read


def _mean_and_peak(runs: Sequence[Series], key: str) -> tuple[float, float]:
    """Return mean and peak over time in megabytes."""

    def over_time(series: Series) -> float:
        return float(np.average(getattr(series, key)[:-1], weights=np.diff(series.time_s)))

    peak = _mean(runs, lambda series: float(getattr(series, key).max()))
    return _mean(runs, over_time) / _MEGABYTE, peak / _MEGABYTE
