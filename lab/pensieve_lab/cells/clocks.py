"""Clocks for the host time spent in a function.

Owns: the clock around a function.
Does not know: what the function does.
Called by `cells.host_costs` and the programs of cellular batching.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pensieve_jax.cellular.request_processor import MakeScheduler
from pensieve_lab.cells.baselines.graph_batching import GraphBatching


class Clock:
    """Callable that forwards to a function and measures its time.

    Attributes:
      total_s: seconds spent in the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap `function`, with no time counted yet."""
        self._function = function
        self.total_s = 0.0

    def __call__(self, *args: Any) -> Any:
        """Call the function and return its result."""
        start_s = time.perf_counter()
        result = self._function(*args)
        self.total_s += time.perf_counter() - start_s
        return result


class PlanningClock:
    """Clock around the choosing and planning of batches, which only graph batching does."""

    def __init__(self) -> None:
        """Start without a scheduler."""
        self._clock: Clock | None = None

    def around(self, make_scheduler: MakeScheduler) -> MakeScheduler:
        """Return a factory whose schedulers are timed; the clock restarts with every scheduler."""

        def make(*args: Any) -> Any:
            scheduler = make_scheduler(*args)
            self._clock = None
            if isinstance(scheduler, GraphBatching):
                self._clock = Clock(scheduler.next_batch)
                scheduler.next_batch = self._clock  # type: ignore[method-assign]
            return scheduler

        return make

    def begin(self) -> None:
        """Reset the count to zero."""
        if self._clock is not None:
            self._clock.total_s = 0.0

    @property
    def total_s(self) -> float | None:
        """Seconds since `begin`; None for a scheduler that plans nothing."""
        return None if self._clock is None else self._clock.total_s
