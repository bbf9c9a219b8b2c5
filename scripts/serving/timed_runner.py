"""When steps began and ended: a runner that notes the time around another one's.

Owns: what counts as a step's wall time, as the host's, and as waiting for the device.
Does not know: what a step computes. Called by: `engine_server`; an engine takes it as its runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pensieve_jax.engine.runner import Progress, Runner
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.scheduler import PlanLayout, StepPlan, StepResult
from pensieve_jax.workload import StepLog, Steps


class TimedRunner:
    """Passes everything on to `runner`.

    A step's time is that of `StepLog`, from when its dispatch begins. While steps follow one another the host
    works from a fetch to the next dispatch, beside the step that was dispatched before.

    Attributes:
      layouts, transfers: the runner's.
      host_s: from fetches to the dispatches that followed, while a step was in flight.
      num_host_steps: dispatches that `host_s` counts.
      dispatch_s: within dispatches, copies of chunks that begin with them included; the launches of kernels
        are not, where jaxlib makes them in a thread of its own.
      device_wait_s: blocked in fetches.
    """

    def __init__(self, runner: Runner, timer: Callable[[], float] = time.perf_counter) -> None:
        """`timer` counts seconds from any origin."""
        self.layouts: Mapping[int, PlanLayout] = runner.layouts
        self.transfers: Transfers = runner.transfers
        self._steps = StepLog(runner.layouts)
        self.host_s = self.dispatch_s = self.device_wait_s = 0.0
        self.num_host_steps = 0
        self._runner = runner
        self._timer = timer

    @property
    def totals(self) -> Steps:
        """Of fetched steps, by bucket."""
        return self._steps.totals

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
        now_s = self._timer()
        self.dispatch_s += now_s - begun_s
        first_begun_s, fetched_s = self._steps.first_begun_s, self._steps.fetched_s
        if first_begun_s is not None and fetched_s > first_begun_s:
            self.host_s += now_s - fetched_s
            self.num_host_steps += 1
        self._steps.launch(plan.layout.num_tokens, int(plan.cu_q_lens[-1]), begun_s)
        return handle

    def fetch(self, handle: Any) -> StepResult:
        """See `Runner`."""
        asked_s = self._timer()
        result = self._runner.fetch(handle)
        now_s = self._timer()
        self._steps.fetch(now_s)
        self.device_wait_s += now_s - asked_s
        return result

    def reset(self) -> None:
        """See `Runner`."""
        self._steps.forget()
        self._runner.reset()

    def memory_analysis(self) -> dict[str, Any]:
        """See `Runner`."""
        return self._runner.memory_analysis()
