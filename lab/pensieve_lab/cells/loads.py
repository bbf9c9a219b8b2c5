"""A load at a fixed rate, served in virtual time, and its figures.

Owns: which part of a run counts, and the figures' names.
Does not know: which rates an experiment has.
Called by the experiments and programs of cellular batching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular.config import CellularConfig
from pensieve_lab.cells.shapes import Shape
from pensieve_lab.cells.simulation import SimulationResult, simulate
from pensieve_lab.cells.times import CellTimes

UNITS = {
    "rate": "requests a second that arrive, at times of a Poisson process",
    "throughput": "requests a second answered while requests came, without the first fifth of that time",
    "latency_s": "from arrival to answer; of requests between the first and the last fifth by arrival",
    "queueing_s": "from arrival to the beginning of the first cell",
    "computation_s": "from there to the answer",
}
_LEFT_OUT = 0.2
_PERCENTILES = (50, 90, 99)


def arrivals(rate: float, num: int, *, seed: int) -> np.ndarray:
    """Return f64[num] arrival times in seconds, of a Poisson process."""
    return np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / rate, num))


def serve(
    shape: Shape,
    times: CellTimes,
    requests: Sequence[Any],
    rate: float,
    *,
    seed: int,
    make_scheduler: Callable[..., Any],
    num_devices: int = 1,
) -> SimulationResult:
    """Serve `requests` in virtual time."""
    config = CellularConfig(num_devices=num_devices, num_rows=200_000)
    arrival_s = arrivals(rate, len(requests), seed=seed)
    return simulate(shape.types, shape.unfold, config, times, requests, arrival_s, make_scheduler)


def figures(served: SimulationResult) -> dict[str, Any]:
    """Return the figures of a run by the keys of `UNITS`.

    Throughput does not count answers after the last arrival, because they come from the backlog.
    """
    num = len(served.end_s)
    skipped = int(_LEFT_OUT * num)
    counted = slice(skipped, num - skipped)
    last_s = float(served.arrival_s[-1])
    first_s = _LEFT_OUT * last_s
    num_answered = np.count_nonzero((served.end_s > first_s) & (served.end_s <= last_s))
    parts = {
        "latency_s": served.end_s - served.arrival_s,
        "queueing_s": served.begin_s - served.arrival_s,
        "computation_s": served.end_s - served.begin_s,
    }
    found: dict[str, Any] = {
        "num_requests": num,
        "throughput": num_answered / (last_s - first_s),
    }
    for name, values in parts.items():
        shares = np.percentile(values[counted], _PERCENTILES)
        found[name] = dict(zip([f"p{one}" for one in _PERCENTILES], shares.tolist(), strict=True))
    return found
