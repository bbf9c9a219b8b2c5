"""BatchMaker's figures 2.7, 2.8, 2.11 and 2.13 to 2.15: loads on the thesis' V100 in virtual time.

Owns: loads, systems and panels of each figure.
Does not know: how cells are scheduled; the engine's own scheduler runs, and its baselines.
Called by `experiments.cells`.

Cell times come from the thesis (`thesis_v100`). Cellular batching also pays the thesis' cost of scheduling
and gathering. Baselines pay for cells only, because the thesis finds them at the bound that cells set
(section 2.7.3).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from pensieve_lab.cells import loads, shapes, systems
from pensieve_lab.cells.simulation import SimulationResult
from pensieve_lab.cells.times import CellTimes, thesis_v100
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.settings import Findings, Settings, Table
from pensieve_lab.workload.structures import complete_tree, europarl_like, treebank_like

_SECONDS = 3.0  # of arrivals, at each point
_SMALL = 0.15  # factor of the small version
_LEAST = 2000  # smallest number of requests at a point
_MAX_S = 0.5  # larger latencies are cut off
ORIGIN = "simulated with the cell times of the thesis' V100"


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
      name: label in the plot.
      make_scheduler: of its system.
      shape: its model.
      requests: returns `num` requests for a seed.
      num_devices: number of serving devices.
    """

    name: str
    make_scheduler: Any
    shape: shapes.Shape
    requests: Callable[[int, int], Sequence[Any]]
    num_devices: int = 1


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A panel: series over rates."""

    title: str
    rates: Sequence[int]
    series: Sequence[Series]


def europarl(num: int, seed: int, at_most: int = 330) -> list[int]:
    lengths: list[int] = europarl_like(num, seed=seed, at_most=at_most).target.tolist()
    return lengths


def _pairs(num: int, seed: int) -> list[tuple[int, int]]:
    pairs = europarl_like(num, seed=seed)
    return list(zip(pairs.source.tolist(), pairs.target.tolist(), strict=True))


def lstm_series(max_batch: int, requests: Callable[[int, int], Sequence[Any]] = europarl) -> list[Series]:
    shape = shapes.lstm(max_batch)
    return [Series(name, systems.SYSTEMS[name], shape, requests) for name in systems.CHAINS]


def _measure(sweeps: Sequence[Sweep], asked: Settings, shown: bool) -> list[dict[str, Any]]:
    """Return a row for every panel, series, rate and seed."""
    jobs = [
        (sweep, series, rate, seed)
        for sweep in sweeps
        for series in sweep.series
        for rate in sweep.rates
        for seed in asked.seeds
    ]
    rows = []
    for sweep, series, rate, seed in tqdm(jobs, "loads", disable=not shown, leave=False):
        served = serve_series(series, rate, seed, small=asked.small)
        place = {"panel": sweep.title, "series": series.name, "rate": rate, "seed": seed}
        rows.append(place | loads.figures(served))
    return rows


def serve_series(series: Series, rate: int, seed: int, *, small: bool) -> SimulationResult:
    seconds = _SECONDS * (_SMALL if small else 1)
    num = int(max(rate * seconds, _LEAST * (_SMALL if small else 1)))
    times = thesis_v100()
    if series.make_scheduler is not systems.SYSTEMS[systems.CELLULAR]:
        times = CellTimes(times.cells_s)
    return loads.serve(
        series.shape,
        times,
        series.requests(num, seed),
        rate,
        seed=seed,
        make_scheduler=series.make_scheduler,
        num_devices=series.num_devices,
    )


def _mean(rows: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], float]) -> float:
    return float(np.mean([read(row) for row in rows]))


def sweep_findings(sweeps: Sequence[Sweep], asked: Settings, shown: bool) -> Findings:
    rows = _measure(sweeps, asked, shown)
    tables, panels = [], []
    for sweep in sweeps:
        curves: dict[str, list[tuple[float, float]]] = {}
        lines = []
        for series in sweep.series:
            for rate in sweep.rates:
                mine = [
                    row
                    for row in rows
                    if (row["panel"], row["series"], row["rate"]) == (sweep.title, series.name, rate)
                ]
                throughput = _mean(mine, lambda row: row["throughput"])
                p90_ms = 1e3 * _mean(mine, lambda row: row["latency_s"]["p90"])
                p99_ms = 1e3 * _mean(mine, lambda row: row["queueing_s"]["p99"])
                curves.setdefault(series.name, []).append((throughput, p90_ms))
                lines.append([series.name, rate, round(throughput), round(p90_ms, 1), round(p99_ms, 2)])
        columns = ["system", "rate", "throughput", "p90 latency, ms", "p99 queueing, ms"]
        tables.append(Table(title=sweep.title, columns=columns, rows=lines))
        panels.append(
            Panel(
                title=sweep.title,
                x_label="requests a second",
                y_label="90th percentile of latency, ms",
                curves=curves,
                y_max=1e3 * _MAX_S,
            )
        )
    return Findings(
        tables=tables,
        panels=panels,
        results={"points": rows, "cells": dataclasses.asdict(thesis_v100())},
        origin=ORIGIN,
        is_simulated=True,
        units=loads.UNITS,
    )


def by_batch() -> list[Sweep]:
    rates = (1000, 2000, 5000, 8000, 12_000, 16_000, 20_000, 22_000, 24_000, 26_000)
    return [
        Sweep("at most 512 in a batch", rates, lstm_series(512)),
        Sweep("at most 64 in a batch", rates[:5], lstm_series(64)),
    ]


def by_width() -> list[Sweep]:
    rates = (1000, 2000, 5000, 8000, 12_000, 16_000, 20_000)
    shape = shapes.lstm()
    in_turn = {10: systems.PADDING} | systems.OTHER_WIDTHS
    oldest_first = {10: systems.PADDING_OLDEST} | systems.OTHER_OLDEST
    return [
        Sweep(
            f"padding by buckets of a width, {order}",
            rates,
            [
                Series(f"width {width}", systems.SYSTEMS[names[width]], shape, europarl)
                for width in sorted(names)
            ],
        )
        for order, names in (("in turn", in_turn), ("oldest first", oldest_first))
    ]


def by_variance() -> list[Sweep]:
    rates = (2000, 5000, 10_000, 15_000, 20_000, 24_000, 27_000)
    return [
        Sweep("24 words each", rates, lstm_series(512, requests=lambda num, _: [24] * num)),
        *(
            Sweep(
                f"at most {at_most} words",
                rates,
                lstm_series(512, requests=functools.partial(europarl, at_most=at_most)),
            )
            for at_most in (50, 100)
        ),
    ]


def by_devices() -> list[Sweep]:
    rates = {
        2: (500, 1000, 2000, 4000, 8000, 10_000, 12_000),
        4: (1000, 2000, 4000, 8000, 16_000, 20_000, 24_000),
    }
    both, same = shapes.seq2seq(512, 256), shapes.seq2seq(256, 256)
    return [
        Sweep(
            f"{num} devices",
            rates[num],
            [
                Series("cellular, 512 and 256", systems.SYSTEMS[systems.CELLULAR], both, _pairs, num),
                Series("cellular, 256 and 256", systems.SYSTEMS[systems.CELLULAR], same, _pairs, num),
                *(
                    Series(name, systems.SYSTEMS[name], same, _pairs, num)
                    for name in (systems.PADDING, systems.PADDING_OLDEST)
                ),
            ],
        )
        for num in (2, 4)
    ]


def trees() -> list[Sweep]:
    shape = shapes.tree_lstm()
    requests = lambda num, seed: treebank_like(num, seed=seed)  # noqa: E731
    series = [Series(name, systems.SYSTEMS[name], shape, requests) for name in systems.TREES]
    return [Sweep("trees like the TreeBank's", (250, 500, 1000, 2000, 3000, 4000, 6000, 8000), series)]


def equal_trees() -> list[Sweep]:
    shape, tree = shapes.tree_lstm(), complete_tree(16)
    names = (*systems.TREES, systems.IDEAL)
    series = [Series(name, systems.SYSTEMS[name], shape, lambda num, seed: [tree] * num) for name in names]
    return [Sweep("complete trees of 16 leaves", (250, 500, 1000, 2000, 4000, 8000, 10_000, 12_000), series)]
