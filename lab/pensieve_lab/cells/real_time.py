"""A load at a fixed rate, served by an engine in real time.

Owns: when requests are sent, and the clock.
Does not know: models or systems.
Called by the programs of cellular batching.

One thread sends and steps, as in a server: every iteration of its loop submits all requests that are due.
Latency counts from the due time, so a late loop is charged for its delay.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular import CellRequest, CellularEngine
from pensieve_jax.cellular.launches import Launch
from pensieve_lab.cells.simulation import SimulationResult

_AT_ONCE = 128


class BeginTimes:
    """Time at which the first cell of each request was launched; used as an engine's `observe`.

    Attributes:
      begin_s: by request number, in seconds since `start`; infinity before the launch.
    """

    def __init__(self) -> None:
        """Start without observing any request."""
        self.begin_s = np.empty(0)
        self._engine: CellularEngine | None = None
        self._zero_s, self._first = 0.0, 0

    def start(self, engine: CellularEngine, num: int, first: int, zero_s: float) -> None:
        """Observe `num` requests from number `first` on."""
        self._engine, self._first, self._zero_s = engine, first, zero_s
        self.begin_s = np.full(num, np.inf)

    def stop(self) -> np.ndarray:
        """Stop observing and return `begin_s`."""
        self._engine = None
        return self.begin_s

    def observe(self, launch: Launch) -> None:
        """Record the launch time of the requests that begin with this launch."""
        if self._engine is None:
            return
        now_s = time.perf_counter() - self._zero_s
        places = np.concatenate(self._engine.requests_of(launch)) - self._first
        self.begin_s[places] = np.minimum(self.begin_s[places], now_s)


def serve(
    engine: CellularEngine,
    requests: Sequence[Any],
    arrival_s: np.ndarray,
    beginnings: BeginTimes,
) -> SimulationResult:
    """Serve until the last request ends; `beginnings` must observe the engine.

    Raises:
      LaunchFailedError: a request failed.
    """
    gc.collect()
    gc.freeze()  # keeps the collector from scanning the requests of a whole run, which no server holds
    try:
        end_s = _serve(engine, requests, arrival_s, beginnings)
    finally:
        begin_s = beginnings.stop()
        gc.unfreeze()
    return SimulationResult(arrival_s, begin_s, end_s)


def _serve(
    engine: CellularEngine,
    requests: Sequence[Any],
    arrival_s: np.ndarray,
    beginnings: BeginTimes,
) -> np.ndarray:
    """Return the end time of each request."""
    num, first = len(requests), engine.stats()["num_submitted"]
    end_s = np.full(num, np.nan)
    num_sent = num_ended = 0
    zero_s = time.perf_counter()
    beginnings.start(engine, num, first, zero_s)

    def note(ended: list[CellRequest]) -> int:
        """Record the end time of these requests; return their number."""
        if ended:
            end_s[[handle.serial - first for handle in ended]] = time.perf_counter() - zero_s
        for handle in ended:
            if handle.error is not None:  # a failed request must not count as an answer
                raise handle.error
        return len(ended)

    while num_ended < num:
        now_s = time.perf_counter() - zero_s
        num_due = int(np.searchsorted(arrival_s, now_s, "right"))
        while num_sent < num_due:
            most = min(num_due, num_sent + _AT_ONCE)
            engine.submit_many(requests[num_sent:most])
            num_sent = most
            # step now, so that devices do not wait until all due requests are submitted
            num_ended += note(engine.step())
        num_ended += note(engine.step())
    return end_s
