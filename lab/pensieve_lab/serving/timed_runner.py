"""A runner and transfers that time the steps and copies of another runner.

Owns: what counts as wall time of a step, as host time, and as waiting for the device; how long copies take.
Does not know: what a step computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_jax.cache import ChunkCopy
from pensieve_jax.engine.runner import Progress, Runner
from pensieve_jax.engine.transfers import Ended, Transfers
from pensieve_jax.scheduler import PlanLayout, StepPlan, StepResult
from pensieve_lab.serving.host_parts import WAIT, HostParts
from pensieve_lab.workload import StepLog, Steps

_READY_S = 1e-4  # a shorter fetch found its ids on the host already


class TimedRunner:
    """Wrapper that forwards to `runner` and records times.

    A step's time is that of `StepLog`, from its launch. While steps follow one another, the host works from a
    fetch to the next choice, concurrently with the step launched before. A dispatch is a launch and a choice.

    Attributes:
      layouts, transfers: the runner's.
      host_s: time from fetches to the following dispatches, while a step was in flight.
      num_host_steps: dispatches that `host_s` counts.
      dispatch_s: time within dispatches, including copies of chunks that start with them; kernel launches are
        excluded if jaxlib makes them in its own thread.
      device_wait_s: time blocked in fetches.
      num_late_steps: fetches whose ids were already there: the device may have waited for the host.
      parts: breakdown of the host's time.
      inner: the wrapped runner.
    """

    def __init__(self, runner: Runner, timer: Callable[[], float] = time.perf_counter) -> None:
        """Wrap `runner`; `timer` counts seconds from any origin."""
        self.layouts: Mapping[int, PlanLayout] = runner.layouts
        self.parts = HostParts(timer)
        self.timed_transfers = TimedTransfers(runner.transfers, self.parts, timer)
        self.transfers: Transfers = self.timed_transfers
        self._steps = StepLog(runner.layouts)
        self.host_s = self.dispatch_s = self.device_wait_s = 0.0
        self.num_host_steps = self.num_late_steps = 0
        self.inner = runner
        self._recorded: list[StepPlan] | None = None
        self._follows = False  # whether the last launch followed a fetch while a step was in flight
        self._counted_s = 0.0
        self._timer = timer

    @contextlib.contextmanager
    def recording(self, plans: list[StepPlan]) -> Iterator[None]:
        """Append every plan that is launched within the context to `plans`."""
        self._recorded = plans
        try:
            yield
        finally:
            self._recorded = None

    @property
    def totals(self) -> Steps:
        """Totals of fetched steps by bucket."""
        return self._steps.totals

    @property
    def in_flight(self) -> bool:
        """Whether a launched step was not fetched yet."""
        return self._steps.first_begun_s is not None

    @property
    def num_compilations(self) -> int:
        return self.inner.num_compilations

    def fill_tiles(self, plan: StepPlan) -> None:
        self.inner.fill_tiles(plan)

    def warm_up(self, progress: Progress | None = None) -> None:
        self.inner.warm_up(progress)

    def launch(self, plan: StepPlan) -> Any:
        self.parts.lap("plan")
        if self._recorded is not None:
            self._recorded.append(plan)
        begun_s = self._timer()
        handle = self.inner.launch(plan)
        now_s = self._timer()
        self.dispatch_s += now_s - begun_s
        first_begun_s, fetched_s = self._steps.first_begun_s, self._steps.fetched_s
        self._follows = first_begun_s is not None and fetched_s > first_begun_s
        self._count_host(now_s)
        self.parts.work |= _work(plan)
        self.parts.lap("dispatch")
        self._steps.launch(plan.layout.num_tokens, int(plan.cu_q_lens[-1]), begun_s)
        return handle

    def choose(self, handle: Any, words: np.ndarray | None) -> None:
        self.parts.lap("masks")
        begun_s = self._timer()
        self.inner.choose(handle, words)
        now_s = self._timer()
        self.dispatch_s += now_s - begun_s
        self._count_host(now_s)
        self.num_host_steps += self._follows
        self.parts.lap("dispatch")
        self.parts.launched(follows=self._follows)

    def fetch(self, handle: Any) -> StepResult:
        self.parts.lap("finish")  # empty if it follows a launch directly
        asked_s = self._timer()
        result = self.inner.fetch(handle)
        now_s = self._timer()
        self._steps.fetch(now_s)
        self.device_wait_s += now_s - asked_s
        self.num_late_steps += now_s - asked_s < _READY_S
        self.parts.lap(WAIT)
        return result

    def _count_host(self, now_s: float) -> None:
        """Add the host's time since the last fetch, launch or choice, if a step was in flight."""
        if self._follows:
            self.host_s += now_s - max(self._steps.fetched_s, self._counted_s)
        self._counted_s = now_s

    def reset(self) -> None:
        self._steps.forget()
        self.timed_transfers.forget()
        self.inner.reset()

    def memory_analysis(self) -> dict[str, Any]:
        return self.inner.memory_analysis()


class TimedTransfers:
    """Wrapper that forwards to `transfers` and records times.

    Attributes:
      out_s, in_s: total time from the request of copies until they were reported complete or expedited.
      num_out, num_in: number of these copies.
    """

    def __init__(self, transfers: Transfers, parts: HostParts, timer: Callable[[], float]) -> None:
        """Wrap `transfers`; `parts` gets the host's time for them as "complete" and "copies"."""
        self.out_s = self.in_s = 0.0
        self.num_out = self.num_in = 0
        self._transfers = transfers
        self._parts = parts
        self._timer = timer
        self._asked_out_s: dict[int, float] = {}
        self._asked_in_s: dict[int, float] = {}

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        self._parts.lap("schedule")
        self._parts.work["chunks_out"] += len(copies)
        self._asked_out_s |= dict.fromkeys((copy.copy_id for copy in copies), self._timer())
        self._transfers.swap_out(copies)

    def swap_in(self, copies: Sequence[ChunkCopy]) -> None:
        self._parts.work["chunks_in"] += len(copies)
        self._asked_in_s |= dict.fromkeys((copy.copy_id for copy in copies), self._timer())
        self._transfers.swap_in(copies)

    def expedite(self, copy_ids: Collection[int]) -> None:
        self._transfers.expedite(copy_ids)
        self._parts.work["expedited"] += len(copy_ids)
        self._end(copy_ids)
        self._parts.lap("copies")

    def completed(self) -> Ended:
        ended = self._transfers.completed()
        for copy_ids in ended:
            self._parts.work["ended"] += len(copy_ids)
            self._end(copy_ids)
        self._parts.lap("complete")
        return ended

    def wait(self) -> None:
        self._transfers.wait()
        self._parts.lap(WAIT)

    def stats(self) -> dict[str, int | float]:
        """Return the transfers' counters and the copies' times."""
        return {
            **self._transfers.stats(),
            "swap_out_s": self.out_s,
            "swap_in_s": self.in_s,
            "num_timed_swap_outs": self.num_out,
            "num_timed_swap_ins": self.num_in,
        }

    def forget(self) -> None:
        """Forget copies in flight, which will not be reported complete."""
        self._asked_out_s.clear()
        self._asked_in_s.clear()

    def _end(self, copy_ids: Collection[int]) -> None:
        now_s = self._timer()
        for copy_id in copy_ids:
            asked_s = self._asked_out_s.pop(copy_id, None)
            if asked_s is not None:
                self.out_s += now_s - asked_s
                self.num_out += 1
            else:
                self.in_s += now_s - self._asked_in_s.pop(copy_id)
                self.num_in += 1


def _work(plan: StepPlan) -> dict[str, int]:
    num_rows = int(plan.num_rows[0])
    num_single = int(np.count_nonzero(np.diff(plan.cu_q_lens[: num_rows + 1]) == 1))
    return {
        "bucket": plan.layout.num_tokens,
        "tokens": int(plan.cu_q_lens[-1]),
        "rows": num_rows,
        "single_rows": num_single,
    }
