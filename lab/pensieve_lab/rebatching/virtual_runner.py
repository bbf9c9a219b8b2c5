"""A device in virtual time: launches compute nothing and take as long as a cost profile says.

Owns: the clock, program order, copies that overlap with programs, and what the serving thread waits for.
Does not know: queries, or who launches what.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.decoding.sampling_rows import StepResult
from pensieve_jax.rebatching.launches import (
    Decode,
    FreeRow,
    Insert,
    Launch,
    Park,
    Prefill,
    Resize,
    Return,
    Shape,
    Suspend,
)
from pensieve_jax.rebatching.ring_shapes import RingShape
from pensieve_lab.rebatching.costs import RingCosts


@dataclass(slots=True)
class _Row:
    """Row outside the ring.

    Attributes:
      length: columns.
      ready_s: when it can be read in device memory.
      left_s: when host memory has it; infinity if no copy was started.
    """

    length: int
    ready_s: float
    left_s: float = math.inf


@dataclass(slots=True)
class Flight:
    """Handle of a launched program that samples.

    Attributes:
      end_s: when the device finishes it.
      serials: queries whose first token it may sample.
      num_tokens: tokens that it samples for queries.
    """

    end_s: float
    serials: tuple[int, ...]
    num_tokens: int


class VirtualRunner:
    """`rebatching.runner.Runner` in virtual time: programs run in program order, and copies overlap with
    them.

    The link carries one copy at a time, in either direction.

    Attributes:
      first_s: when the first token of each query reached the host, by serial.
      num_tokens: tokens fetched.
      device_s: device time of all launches so far.
      num_calls: launches and fetches.
    """

    def __init__(self, costs: RingCosts, clock: VirtualClock, max_batch: int) -> None:
        self._costs, self._clock = costs, clock
        self._decode_s = lru_cache(maxsize=None)(costs.decode_of)
        none = np.zeros((max_batch, 0))
        zeros = np.zeros(max_batch, np.int32)
        self._result = StepResult(zeros, zeros.astype(np.float32), none.astype(np.int32), none)
        self.first_s: dict[int, float] = {}
        self.num_tokens = self.num_calls = 0
        self.device_s = 0.0
        self._free_s = self._link_free_s = 0.0
        self._shape = RingShape(0, 0)
        self._rows: dict[int, _Row] = {}

    def launch(self, launch: Launch) -> Flight | None:
        self.num_calls += 1
        match launch:
            case Decode():
                return self._samples(self._decode_s(self._shape), (), len(launch.samples))
            case Prefill():
                took_s = self._costs.prefill_of(launch.num_rows, launch.length)
                flight = self._samples(took_s, launch.serials, len(launch.samples))
                for serial in launch.serials:
                    self._rows[serial] = _Row(launch.length, flight.end_s)
                return flight
            case Shape():
                took_s = self._costs.shaped_of(self._shape, len(launch.token_ids))
                return self._samples(took_s, (launch.serial,), len(launch.samples))
            case Insert():
                row = self._rows.pop(launch.serial)
                self._run(self._costs.insert_of(self._shape), row.ready_s)
            case Suspend():
                length = len(launch.places)
                self._rows[launch.serial] = _Row(length, self._run(self._costs.take_of(length)))
            case Park():
                self._park(launch)
            case Return():
                row = self._rows[launch.serial]
                row.ready_s, row.left_s = self._copy(row, 0.0), math.inf
            case FreeRow():
                del self._rows[launch.serial]
            case Resize():
                self._resize(launch)
        return None

    def fetch(self, handle: Flight) -> StepResult:
        """Advance the clock until the ids are on the host, and return a result of zeros."""
        self._clock.advance_to(handle.end_s + self._costs.fetch_s)
        self.num_calls += 1
        self.num_tokens += handle.num_tokens
        for serial in handle.serials:
            self.first_s.setdefault(serial, self._clock.now())
        return self._result

    def has_left(self, serial: int) -> bool:
        row = self._rows.get(serial)
        return row is not None and row.left_s <= self._clock.now()

    def reset(self, kept_serials: Collection[int]) -> None:
        self._rows = {serial: row for serial, row in self._rows.items() if serial in kept_serials}

    def _samples(self, took_s: float, serials: tuple[int, ...], num_tokens: int) -> Flight:
        """Launch a program that samples, which also costs time of the serving thread."""
        self._clock.advance(self._costs.host_s)
        return Flight(self._run(took_s), serials, num_tokens)

    def _run(self, took_s: float, ready_s: float = 0.0) -> float:
        """Occupy the device for `took_s`, not before `ready_s`; return the end."""
        self._free_s = max(self._free_s, self._clock.now(), ready_s) + took_s
        self.device_s += took_s
        return self._free_s

    def _copy(self, row: _Row, ready_s: float) -> float:
        """Copy a row over the link; return the end."""
        begin_s = max(self._link_free_s, self._clock.now(), ready_s)
        self._link_free_s = begin_s + self._costs.copy_of(row.length)
        return self._link_free_s

    def _park(self, launch: Park) -> None:
        row = self._rows[launch.serial]
        if row.left_s == math.inf:
            row.left_s = self._copy(row, row.ready_s)
        if launch.waits:
            self._clock.advance_to(row.left_s)

    def _resize(self, launch: Resize) -> None:
        """Change the shape; the serving thread waits while contents are moved layer by layer."""
        self._shape, moves = launch.shape, launch.relayout is not None
        end_s = self._run(self._costs.resize_of(launch.shape, moves=moves))
        if moves:
            self._clock.advance_to(end_s)
