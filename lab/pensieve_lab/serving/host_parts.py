"""A breakdown of the serving thread's time: the parts of every step, measured while it serves.

Owns: the parts, their sums, the host time of whole steps, and a table with a row for every step.
Does not know: engines.

Every moment of the thread belongs to one part: each `lap` adds the time since the previous lap to its part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

PARTS = ("finish", "users", "complete", "schedule", "copies", "plan", "masks", "dispatch")
"""Parts of the host's work for a step in order, from the ids of an earlier step on: give ids to turns and
settle those that end; users; completed copies; the scheduler; starting copies; the plan with its tiles; the
masks of rows whose choice waits for ids; the launches with the copies that start with them."""
WAIT, IDLE = "wait", "idle"  # waiting for ids; waiting for a turn
MAX_MS = 32  # last bin of the histogram, which includes longer steps


class StepWork(NamedTuple):
    """Work of a step: its bucket, query tokens, rows, rows of one token, and chunks.

    `chunks_out` and `chunks_in` were asked for before the step, it waits for `expedited`, and `ended` copies
    were reported as complete. `submitted` and `answered` count turns since the previous step.
    """

    bucket: int = 0
    tokens: int = 0
    rows: int = 0
    single_rows: int = 0
    chunks_out: int = 0
    chunks_in: int = 0
    expedited: int = 0
    ended: int = 0
    submitted: int = 0
    answered: int = 0


COLUMNS = ("time_s", "follows", f"{WAIT}_s", f"{IDLE}_s", *(f"{part}_s" for part in PARTS), *StepWork._fields)
"""Columns of the table: when the step's launch ended; whether a step was in flight then, so that the host's
time counts; the parts in seconds; the work."""


class HostParts:
    """Stopwatch with laps, and the work collected for the next step.

    Attributes:
      work: work of the next step, by the names of `StepWork`.
      seconds: time by part, of steps that followed others.
    """

    def __init__(self, timer: Callable[[], float] = time.perf_counter) -> None:
        """Start. `timer` counts seconds from any origin."""
        self.work = dict.fromkeys(StepWork._fields, 0)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._timer = timer
        self._laps = dict.fromkeys((WAIT, IDLE, *PARTS), 0.0)
        self._last_s = timer()
        self._by_ms = [0] * (MAX_MS + 1)
        self._rows: list[tuple[float, ...]] = []

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`."""
        now_s = self._timer()
        self._laps[part] += now_s - self._last_s
        self._last_s = now_s

    def launched(self, *, follows: bool) -> None:
        """Record a launched step; `follows` if another step was in flight, so that the host's time counts."""
        laps = self._laps
        self._rows.append((self._last_s, float(follows), *laps.values(), *self.work.values()))
        if follows:
            host_s = 0.0
            for part in PARTS:
                self.seconds[part] += laps[part]
                host_s += laps[part]
            self._by_ms[min(int(1e3 * host_s), MAX_MS)] += 1
        self._laps = dict.fromkeys(laps, 0.0)
        self.work = dict.fromkeys(self.work, 0)

    def counters(self) -> dict[str, float]:
        """Return seconds of parts, and steps by whole milliseconds of the host, since the start."""
        parts = {f"host_{part}_s": seconds for part, seconds in self.seconds.items()}
        return parts | {f"host_steps_of_{ms}_ms": count for ms, count in enumerate(self._by_ms)}

    def save(self, path: Path) -> None:
        """Write the table: f64[number of steps, len(COLUMNS)] as `steps`, and `columns`; raises OSError."""
        table = np.array(self._rows, np.float64).reshape(len(self._rows), len(COLUMNS))
        np.savez_compressed(path, steps=table, columns=np.array(COLUMNS))
