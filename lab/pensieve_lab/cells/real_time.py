"""A load at a rate, served by an engine in real time.

Owns: when requests are sent, and the clock.
Does not know: models or systems.

One thread sends and steps, as a server's would: every turn of its loop takes all that is due. Latency counts
from when a request was due, so a loop that is late is charged for it.
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


class Beginnings:
    """When the first cell of each request was launched, as an engine's `observe`.

    Attributes:
      begin_s: by number of request, since `start`; infinity before.
    """

    def __init__(self) -> None:
        """Look at nothing yet."""
        self.begin_s = np.empty(0)
        self._engine: CellularEngine | None = None
        self._zero_s, self._first = 0.0, 0

    def start(self, engine: CellularEngine, num: int, first: int, zero_s: float) -> None:
        """Look at `num` requests from number `first` on."""
        self._engine, self._first, self._zero_s = engine, first, zero_s
        self.begin_s = np.full(num, np.inf)

    def stop(self) -> np.ndarray:
        """Look at nothing any more; returns `begin_s`."""
        self._engine = None
        return self.begin_s

    def observe(self, launch: Launch) -> None:
        """See `CellularEngine`."""
        if self._engine is None:
            return
        now_s = time.perf_counter() - self._zero_s
        places = np.concatenate(self._engine.requests_of(launch)) - self._first
        self.begin_s[places] = np.minimum(self.begin_s[places], now_s)


def serve(
    engine: CellularEngine,
    requests: Sequence[Any],
    arrival_s: np.ndarray,
    beginnings: Beginnings,
) -> SimulationResult:
    """To the end of the last request; `beginnings` is what the engine was given to observe it.

    Raises:
      LaunchFailedError: a request failed.
    """
    gc.collect()
    gc.freeze()  # requests of a whole run would be looked at again and again, which a server has not got
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
    beginnings: Beginnings,
) -> np.ndarray:
    """When each of them had ended."""
    num, first = len(requests), engine.stats()["num_submitted"]
    end_s = np.full(num, np.nan)
    num_sent = num_ended = 0
    zero_s = time.perf_counter()
    beginnings.start(engine, num, first, zero_s)

    def note(ended: list[CellRequest]) -> int:
        """When these ended; returns how many they are."""
        if ended:
            end_s[[handle.serial - first for handle in ended]] = time.perf_counter() - zero_s
        for handle in ended:
            if handle.error is not None:  # no answer, however soon it came
                raise handle.error
        return len(ended)

    while num_ended < num:
        now_s = time.perf_counter() - zero_s
        num_due = int(np.searchsorted(arrival_s, now_s, "right"))
        while num_sent < num_due:
            most = min(num_due, num_sent + _AT_ONCE)
            engine.submit_many(requests[num_sent:most])
            num_sent = most
            num_ended += note(engine.step())  # devices do not wait for all that is due
        num_ended += note(engine.step())
    return end_s
