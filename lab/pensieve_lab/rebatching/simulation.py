"""Runs an engine in virtual time: real queries, policy and launches, whose times come from a cost profile.

Owns: when queries arrive, and what is recorded of each query and step.
Does not know: JAX, or who joins when: the engine's own loop and scheduler decide that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import ContextLengthError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.metrics import Observe, RebatchingMetrics, StepSeen, unobserved
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring_shapes import RingShapes
from pensieve_lab.rebatching.costs import RingCosts
from pensieve_lab.rebatching.virtual_runner import VirtualRunner


class SimulatedQuery(Protocol):
    """Query to simulate, described by its numbers."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def output_tokens(self) -> int:
        """Length of the reply; no token ends it earlier."""
        ...

    @property
    def arrival_s(self) -> float:
        """Arrival in seconds since the start."""
        ...

    @property
    def priority(self) -> int:
        """Priority; higher is more urgent."""
        ...


@dataclass(frozen=True)
class Series:
    """State after each step.

    Attributes:
      time_s: f64[n].
      completed, tokens: i64[n], answered queries and tokens so far.
      kv_bytes: i64[n], device memory of the ring and of rows beside it.
      span_bytes: i64[n], the part of it that the ring needs: columns up to the cursor, of occupied rows.
    """

    time_s: np.ndarray
    completed: np.ndarray
    tokens: np.ndarray
    kv_bytes: np.ndarray
    span_bytes: np.ndarray


@dataclass(frozen=True)
class RebatchingResult:
    """Result of a simulation; arrays have an entry per query, in the order given.

    Attributes:
      arrival_s, first_s, end_s: times of arrival, first token and last token.
      series: state after each step; None if not asked for.
      metrics: the engine's metrics.
      device_s: busy time of the device.
    """

    arrival_s: np.ndarray
    first_s: np.ndarray
    end_s: np.ndarray
    series: Series | None
    metrics: RebatchingMetrics
    device_s: float

    @property
    def completion_s(self) -> float:
        """Time of the last answer."""
        return float(self.end_s.max())


class _Recorder:
    """Records a row of a `Series` for each step."""

    def __init__(self, runner: VirtualRunner, clock: VirtualClock, token_bytes: int, then: Observe) -> None:
        self._runner, self._clock, self._token_bytes, self._then = runner, clock, token_bytes, then
        self._num_completed = 0
        self._lines: list[tuple[float, int, int, int, int]] = []

    def see(self, seen: StepSeen) -> None:
        """Record a launched step and the results that arrived with it."""
        self._num_completed += len(seen.ended)
        span_bytes = seen.ring.span * seen.ring.num_held * self._token_bytes
        line = (self._clock.now(), self._num_completed, self._runner.num_tokens, seen.kv_bytes, span_bytes)
        self._lines.append(line)
        self._then(seen)

    def series(self) -> Series:
        """Return the recorded counts over time, an array for each."""
        time_s, *counts = zip(*self._lines, strict=True)
        return Series(np.array(time_s), *(np.array(one, np.int64) for one in counts))


def simulate(
    config: RebatchingConfig,
    costs: RingCosts,
    queries: Sequence[SimulatedQuery],
    *,
    max_positions: int,
    records: bool = False,
    observe: Observe = unobserved,
) -> RebatchingResult:
    """Serve queries, which must be sorted by arrival, until the last is answered.

    Args:
      config: configuration of the engine.
      costs: profile of the model on the device; its `token_bytes` and `config` determine the ring's shapes.
      queries: queries with their arrivals.
      max_positions: positions of the model.
      records: whether to record `RebatchingResult.series`.
      observe: observer of every step, as of an engine.

    Raises:
      ConfigError: the budget holds no ring.
      ContextLengthError: a query is too long for the ring.
    """
    ring_shapes = RingShapes(config, costs.token_bytes, max_positions)
    max_context_tokens = min(ring_shapes.max_context_tokens, max_positions)
    waiting = [_query(index, one, max_context_tokens) for index, one in enumerate(queries)]
    arrival_s = [float(one.arrival_s) for one in queries]
    clock = VirtualClock()
    runner = VirtualRunner(costs, clock, config.max_batch)
    recorder = _Recorder(runner, clock, costs.token_bytes, observe) if records else None
    loop = RebatchingLoop(config, ring_shapes, runner, observe=recorder.see if recorder else observe)
    end_s = np.full(len(waiting), np.nan)
    num_sent = num_ended = 0
    while num_ended < len(waiting):
        if not loop.queries:
            clock.advance_to(arrival_s[num_sent])
        while num_sent < len(waiting) and arrival_s[num_sent] <= clock.now():
            loop.submit(waiting[num_sent])
            num_sent += 1
        num_calls = runner.num_calls
        for query in loop.step():
            end_s[query.serial] = clock.now()
            num_ended += 1
        assert runner.num_calls > num_calls, "no program ran, so the clock cannot advance"
    first_s = np.array([runner.first_s[index] for index in range(len(waiting))])
    series = recorder.series() if recorder else None
    return RebatchingResult(np.array(arrival_s), first_s, end_s, series, loop.metrics, runner.device_s)


def _query(serial: int, simulated: SimulatedQuery, max_context_tokens: int) -> Query:
    """Return a query that ends at its length only; its ids are zeros."""
    num_tokens = simulated.prompt_tokens + simulated.output_tokens
    if num_tokens > max_context_tokens:
        limit = f"at most {max_context_tokens}, prompt and reply"
        raise ContextLengthError(f"queries[{serial}]", f"{num_tokens} tokens", limit)
    return Query(
        serial,
        [0] * simulated.prompt_tokens,
        SamplingParams(max_tokens=simulated.output_tokens, ignore_eos=True),
        seed=0,
        priority=simulated.priority,
        ending_ids=(),
        max_context_tokens=max_context_tokens,
        tokenizer=None,
    )
