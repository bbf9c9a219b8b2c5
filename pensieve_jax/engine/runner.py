"""The interface between the engine and the runner of its steps.

Owns: the `Runner` protocol. `device.model_runner.ModelRunner` implements it with JAX; tests have fakes that
compute tokens by hand.
Does not know: JAX, models or scheduling.
Called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

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
        """Write the lists of `plan.tiles` from the lengths of its rows, in the runner's own format."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every bucket, so that no later step compiles anything.

        Raises:
          ConfigError: the device has too little memory; the error names `cache.gpu_pages`.
        """
        ...

    def launch(self, plan: StepPlan) -> Any:
        """Start the forward pass of a step and return a handle; never waits for the device.

        Steps run in the order of launches; `plan.prev_samples` refers to the step launched before. The runner
        owns the plan from here on. Call `choose` with the handle before the next launch.

        Raises:
          StepFailedError: the step could not be started; call `reset` before the next one.
        """
        ...

    def choose(self, handle: Any, words: np.ndarray | None) -> None:
        """Start the choice of a launched step's ids; never waits for the device.

        Args:
          handle: handle of the last launch.
          words: i32[S, ceil(V / 32)], the ids that each row may choose, for all S rows of the plan's layout:
            bit `id % 32` of word `id // 32`. None: all ids. The runner owns it from here on.

        Raises:
          StepFailedError: the choice could not be started; call `reset` before the next step.
        """
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a step's choice and return it, in the plan's rows. Call it once per handle.

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
