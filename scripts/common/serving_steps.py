"""When steps began and ended: a runner that notes the time around another one's.

Owns: what counts as a step's wall time, as the host's, and as waiting for the device.
Does not know: what a step computes. Called by: `serving_engine`; an engine takes it as its runner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pensieve_jax.engine.runner import Progress, Runner
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.scheduler import PlanLayout, StepPlan, StepResult
from pensieve_jax.simulator import StepTotals


class _InFlight(NamedTuple):
    """A step whose ids have not been fetched: its bucket and tokens, and when its dispatch began."""

    bucket: int
    num_tokens: int
    begun_s: float


class TimedRunner:
    """Passes everything on to `runner`.

    A step's time runs from its dispatch, or from the end of the step before if that was later, until its ids
    are on the host. While steps follow one another the host works from a fetch to the next dispatch, beside
    the step that was dispatched before.

    Attributes:
      layouts, transfers: the runner's.
      totals: of fetched steps, by bucket.
      host_s: from fetches to the dispatches that followed, while a step was in flight.
      num_host_steps: dispatches that `host_s` counts.
      device_wait_s: blocked in fetches.
    """

    def __init__(self, runner: Runner, timer: Callable[[], float] = time.perf_counter) -> None:
        """`timer` counts seconds from any origin."""
        self.layouts: Mapping[int, PlanLayout] = runner.layouts
        self.transfers: Transfers = runner.transfers
        self.totals: dict[int, StepTotals] = {bucket: StepTotals() for bucket in runner.layouts}
        self.host_s = self.device_wait_s = 0.0
        self.num_host_steps = 0
        self._runner = runner
        self._timer = timer
        self._in_flight: deque[_InFlight] = deque()
        self._fetched_s = 0.0

    @property
    def num_compilations(self) -> int:
        """See `Runner`."""
        return self._runner.num_compilations

    def fill_tiles(self, plan: StepPlan) -> None:
        """See `Runner`."""
        self._runner.fill_tiles(plan)

    def warm_up(self, progress: Progress | None = None) -> None:
        """See `Runner`."""
        self._runner.warm_up(progress)

    def dispatch(self, plan: StepPlan) -> Any:
        """See `Runner`."""
        begun_s = self._timer()
        handle = self._runner.dispatch(plan)
        if self._in_flight and self._fetched_s > self._in_flight[0].begun_s:
            self.host_s += self._timer() - self._fetched_s
            self.num_host_steps += 1
        self._in_flight.append(_InFlight(plan.layout.num_tokens, int(plan.cu_q_lens[-1]), begun_s))
        return handle

    def fetch(self, handle: Any) -> StepResult:
        """See `Runner`."""
        asked_s = self._timer()
        result = self._runner.fetch(handle)
        now_s = self._timer()
        step = self._in_flight.popleft()
        seconds = now_s - max(self._fetched_s, step.begun_s)
        self.totals[step.bucket] = self.totals[step.bucket].plus(StepTotals(1, seconds, step.num_tokens))
        self.device_wait_s += now_s - asked_s
        self._fetched_s = now_s
        return result

    def reset(self) -> None:
        """See `Runner`."""
        self._in_flight.clear()
        self._runner.reset()

    def memory_analysis(self) -> dict[str, Any]:
        """See `Runner`."""
        return self._runner.memory_analysis()
