"""How long the host is in a function.

Owns: the clock around it.
Does not know: what the function does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pensieve_jax.cellular.request_processor import MakeScheduler
from pensieve_lab.cells.baselines.graph_batching import GraphBatching


class Clock:
    """A function that is called as before.

    Attributes:
      total_s: seconds in it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """It was not called yet."""
        self._function = function
        self.total_s = 0.0

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        start_s = time.perf_counter()
        result = self._function(*args)
        self.total_s += time.perf_counter() - start_s
        return result


class PlanningClock:
    """Around what graph batching does to choose and plan batches; of other schedulers there is none."""

    def __init__(self) -> None:
        """No scheduler yet."""
        self._clock: Clock | None = None

    def around(self, make_scheduler: MakeScheduler) -> MakeScheduler:
        """The same, with a clock, which begins anew with every scheduler."""

        def make(*args: Any) -> Any:
            scheduler = make_scheduler(*args)
            self._clock = None
            if isinstance(scheduler, GraphBatching):
                self._clock = Clock(scheduler.next_batch)
                scheduler.next_batch = self._clock  # type: ignore[method-assign]
            return scheduler

        return make

    def begin(self) -> None:
        """Count from now on."""
        if self._clock is not None:
            self._clock.total_s = 0.0

    @property
    def total_s(self) -> float | None:
        """Since `begin`; None of a scheduler that plans nothing."""
        return None if self._clock is None else self._clock.total_s
