"""The interface between the engine and the runner of its steps.

Owns: the `Runner` protocol. `device.model_runner.ModelRunner` implements it with JAX; tests have fakes that
compute tokens by hand.
Does not know: JAX, models or scheduling.
Called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pensieve_jax.decoding.sampling_rows import StepResult
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.scheduler.plan import PlanLayout, StepPlan

type Progress = Callable[[int, int, str], None]
"""Called with the number of executables that are ready, their total number, and the name of the last one."""


class Runner(Protocol):
    """An executor of steps, one after the other; it owns the weights and the pages of every layer.

    Attributes:
      layouts: plan layout of every bucket, by the bucket's number of tokens.
      transfers: copies chunks between its pages and host memory.
    """

    layouts: Mapping[int, PlanLayout]
    transfers: Transfers

    def fill_tiles(self, plan: StepPlan) -> None:
        """Write `plan.tiles` from the lengths of its rows, in the runner's own format."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every bucket, so that no later step compiles anything.

        Raises:
          ConfigError: the device has too little memory; the error names `cache.gpu_pages`.
        """
        ...

    def dispatch(self, plan: StepPlan) -> Any:
        """Start one step and return a handle for `fetch`; never waits for the device.

        Steps run in the order of dispatch; `plan.prev_samples` refers to the previously dispatched step. The
        runner owns the plan from here on.

        Raises:
          StepFailedError: the step could not be started; call `reset` before the next one.
        """
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a step and return its samples, in the plan's rows. Call it once per handle.

        Raises:
          StepFailedError: this step, or one that it depends on, failed; call `reset` before the next one.
        """
        ...

    def reset(self) -> None:
        """Make new, empty pages after a failed step, when only the weights on the device can be trusted.

        The transfers also forget copies in flight; chunks already in host slots stay valid.

        Raises:
          StepFailedError: the device has no memory for the pages; call `reset` again before the next step.
        """
        ...

    @property
    def num_compilations(self) -> int:
        """Number of all compilations in this process since the runner was made."""
        ...

    def memory_analysis(self) -> dict[str, Any]:
        """Return bytes per device, in total and per bucket; empty if unknown."""
        ...
