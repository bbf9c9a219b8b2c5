"""An engine in virtual time: the same queries, policy and launches, which only take as long as a profile says.

Owns: the clock, a device that takes time and computes nothing, and when queries arrive.
Does not know: JAX, or who joins when: that is the engine's own loop and scheduler.
Called by: experiments, and tests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from pensieve_jax.core.errors import ContextLengthError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.costs import RingCosts
from pensieve_jax.rebatching.lattice import Lattice, RingShape
from pensieve_jax.rebatching.launches import (
    Decode,
    Drop,
    Insert,
    Launch,
    Park,
    Prefill,
    Resize,
    Return,
    Shape,
    Suspend,
)
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.metrics import Metrics, Observe, StepSeen, unobserved
from pensieve_jax.rebatching.query import Query
from pensieve_jax.scheduler.plan import StepResult


class Asked(Protocol):
    """A query, by its numbers."""

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt."""
        ...

    @property
    def output_tokens(self) -> int:
        """Of the reply, which ends by its length alone."""
        ...

    @property
    def arrival_s(self) -> float:
        """When it comes, since the start."""
        ...

    @property
    def priority(self) -> int:
        """Higher is more urgent."""
        ...


class VirtualClock:
    """Seconds since the start of a run, as the serving thread sees them."""

    now_s = 0.0


@dataclass(slots=True)
class _Row:
    """A row beside the ring.

    Attributes:
      length: in columns.
      ready_s: when it may be read in device memory.
      left_s: when host memory has it; infinity if it is not on its way there.
    """

    length: int
    ready_s: float
    left_s: float = math.inf


@dataclass(slots=True)
class Flight:
    """A program that samples, once launched: `Runner`'s handle.

    Attributes:
      end_s: on the device.
      serials: whose first token it may be.
      num_tokens: that it samples for somebody.
    """

    end_s: float
    serials: tuple[int, ...]
    num_tokens: int


class VirtualRunner:
    """See `rebatching.runner.Runner`: programs run one by one in program order, copies beside them.

    The link takes one copy at a time, whichever way it goes.

    Attributes:
      first_s: when the first token of each query was on the host, by serial.
      num_tokens: that were fetched.
      device_s: for which the device has computed, or is going to.
      num_calls: launches and fetches.
    """

    def __init__(self, costs: RingCosts, clock: VirtualClock, max_batch: int) -> None:
        """Nothing has run."""
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

    @property
    def next_left_s(self) -> float:
        """When the next row has left the device, of those that are leaving; infinity if none is."""
        return min((r.left_s for r in self._rows.values() if r.left_s > self._clock.now_s), default=math.inf)

    def launch(self, launch: Launch) -> Flight | None:
        """See `Runner`."""
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
            case Drop():
                del self._rows[launch.serial]
            case Resize():
                self._resize(launch)
        return None

    def fetch(self, handle: Flight) -> StepResult:
        """See `Runner`: the clock goes on to where its ids are on the host."""
        now_s = self._clock.now_s = max(self._clock.now_s, handle.end_s + self._costs.fetch_s)
        self.num_calls += 1
        self.num_tokens += handle.num_tokens
        for serial in handle.serials:
            self.first_s.setdefault(serial, now_s)
        return self._result

    def has_left(self, serial: int) -> bool:
        """See `Runner`."""
        row = self._rows.get(serial)
        return row is not None and row.left_s <= self._clock.now_s

    def reset(self, kept: Collection[int]) -> None:
        """See `Runner`."""
        self._rows = {serial: row for serial, row in self._rows.items() if serial in kept}

    def _samples(self, took_s: float, serials: tuple[int, ...], num_tokens: int) -> Flight:
        """A program of a step, for which the serving thread has to do something."""
        self._clock.now_s += self._costs.host_s
        return Flight(self._run(took_s), serials, num_tokens)

    def _run(self, took_s: float, ready_s: float = 0.0) -> float:
        """The device computes for so long, not before `ready_s`; returns when that ends."""
        self._free_s = max(self._free_s, self._clock.now_s, ready_s) + took_s
        self.device_s += took_s
        return self._free_s

    def _copy(self, row: _Row, ready_s: float) -> float:
        """A row crosses the link; returns when it is there."""
        begin_s = max(self._link_free_s, self._clock.now_s, ready_s)
        self._link_free_s = begin_s + self._costs.copy_of(row.length)
        return self._link_free_s

    def _park(self, launch: Park) -> None:
        row = self._rows[launch.serial]
        if row.left_s == math.inf:
            row.left_s = self._copy(row, row.ready_s)
        if launch.waits:
            self._clock.now_s = max(self._clock.now_s, row.left_s)

    def _resize(self, launch: Resize) -> None:
        """What is moved is moved layer by layer, for which the serving thread waits."""
        self._shape, moves = launch.shape, launch.relayout is not None
        end_s = self._run(self._costs.resize_of(launch.shape, moves=moves))
        if moves:
            self._clock.now_s = max(self._clock.now_s, end_s)


@dataclass(frozen=True)
class Series:
    """What was there behind each step.

    Attributes:
      time_s: f64[n].
      completed, tokens: i64[n], queries that were answered and tokens that had come.
      kv_bytes: i64[n], of device memory: the ring, and rows beside it.
      span_bytes: i64[n], what the ring needed of that: columns up to the cursor, of rows that somebody held.
    """

    time_s: np.ndarray
    completed: np.ndarray
    tokens: np.ndarray
    kv_bytes: np.ndarray
    span_bytes: np.ndarray


@dataclass(frozen=True)
class Served:
    """What a run was like; arrays have an entry for each query, in the order in which they were given.

    Attributes:
      arrival_s, first_s, end_s: when it came, and when its first token and its last were there.
      series: behind each step; None if not asked for.
      metrics: the engine's.
      device_s: for which the device computed.
    """

    arrival_s: np.ndarray
    first_s: np.ndarray
    end_s: np.ndarray
    series: Series | None
    metrics: Metrics
    device_s: float

    @property
    def completion_s(self) -> float:
        """When the last one was answered."""
        return float(self.end_s.max())


class _Recorder:
    """Notes a line of a `Series` for each step."""

    def __init__(self, runner: VirtualRunner, clock: VirtualClock, token_bytes: int, then: Observe) -> None:
        self._runner, self._clock, self._token_bytes, self._then = runner, clock, token_bytes, then
        self._num_completed = 0
        self._lines: list[tuple[float, int, int, int, int]] = []

    def see(self, seen: StepSeen) -> None:
        """A step was launched, and one before it has come."""
        self._num_completed += len(seen.ended)
        span_bytes = seen.ring.span * seen.ring.num_held * self._token_bytes
        line = (self._clock.now_s, self._num_completed, self._runner.num_tokens, seen.kv_bytes, span_bytes)
        self._lines.append(line)
        self._then(seen)

    def series(self) -> Series:
        """All lines."""
        time_s, *counts = zip(*self._lines, strict=True)
        return Series(np.array(time_s), *(np.array(one, np.int64) for one in counts))


def simulate(
    config: RebatchingConfig,
    costs: RingCosts,
    queries: Sequence[Asked],
    *,
    max_positions: int,
    records: bool = False,
    observe: Observe = unobserved,
) -> Served:
    """Serve queries that arrive in rising order, to the end of the last.

    Args:
      config: of the engine.
      costs: of the model on the device; its `token_bytes` and `config` give the shapes of the ring.
      queries: with when they arrive.
      max_positions: the model's.
      records: give `Served.series`.
      observe: told of every step, as by an engine.

    Raises:
      ConfigError: the budget holds no ring.
      ContextLengthError: a query is too long for it.
    """
    lattice = Lattice(config, costs.token_bytes, max_positions)
    most = min(lattice.max_context_tokens, max_positions)
    waiting = [_query(index, one, most) for index, one in enumerate(queries)]
    arrival_s = [float(one.arrival_s) for one in queries]
    clock = VirtualClock()
    runner = VirtualRunner(costs, clock, config.max_batch)
    recorder = _Recorder(runner, clock, costs.token_bytes, observe) if records else None
    loop = RebatchingLoop(config, lattice, runner, observe=recorder.see if recorder else observe)
    end_s = np.full(len(waiting), np.nan)
    num_sent = num_ended = 0
    while num_ended < len(waiting):
        if not loop.queries:
            clock.now_s = max(clock.now_s, arrival_s[num_sent])
        while num_sent < len(waiting) and arrival_s[num_sent] <= clock.now_s:
            loop.submit(waiting[num_sent])
            num_sent += 1
        num_calls = runner.num_calls
        for query in loop.step():
            end_s[query.serial] = clock.now_s
            num_ended += 1
        if runner.num_calls == num_calls and loop.queries:  # nothing runs: a row has to leave first
            next_arrival_s = arrival_s[num_sent] if num_sent < len(waiting) else math.inf
            clock.now_s = min(runner.next_left_s, next_arrival_s)
            assert clock.now_s < math.inf, "nothing runs, and nobody waits for anything"
    first_s = np.array([runner.first_s[index] for index in range(len(waiting))])
    series = recorder.series() if recorder else None
    return Served(np.array(arrival_s), first_s, end_s, series, loop.metrics, runner.device_s)


def _query(serial: int, asked: Asked, max_context_tokens: int) -> Query:
    """Ids are zeros; the reply ends by its length."""
    num_tokens = asked.prompt_tokens + asked.output_tokens
    if num_tokens > max_context_tokens:
        limit = f"at most {max_context_tokens}, prompt and reply"
        raise ContextLengthError(f"queries[{serial}]", f"{num_tokens} tokens", limit)
    return Query(
        serial,
        [0] * asked.prompt_tokens,
        SamplingParams(max_tokens=asked.output_tokens, ignore_eos=True),
        seed=0,
        priority=asked.priority,
        ending_ids=(),
        max_context_tokens=max_context_tokens,
        tokenizer=None,
    )
