"""What the engine asks of whatever runs its steps.

Owns: the `Runner` protocol. The JAX one is `device.model_runner.ModelRunner`; tests have others, which
compute tokens by hand.
Does not know: JAX, models, scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pensieve_jax.decoding.sampling_rows import StepResult
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.scheduler.plan import PlanLayout, StepPlan

type Progress = Callable[[int, int, str], None]
"""Called with the number of executables that are ready, the number in all, and the last one's name."""


class Runner(Protocol):
    """Runs steps, one after the other, on state that it owns: weights and the pages of every layer.

    Attributes:
      layouts: the plan layout of every bucket, by its number of tokens.
      transfers: what moves chunks between its pages and host memory.
    """

    layouts: Mapping[int, PlanLayout]
    transfers: Transfers

    def fill_tiles(self, plan: StepPlan) -> None:
        """Write `plan.tiles` from the lengths of its rows, in a form that only the runner knows."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Prepare every bucket; no step after this compiles anything.

        Raises:
          ConfigError: the device's memory does not suffice; names `cache.gpu_pages`.
        """
        ...

    def dispatch(self, plan: StepPlan) -> Any:
        """Start one step and return a handle for `fetch`; never waits for the device.

        Steps run in the order of dispatch; `plan.prev_samples` refers to the step dispatched before. The
        plan belongs to the runner from here on.

        Raises:
          StepFailedError: the step could not be started; `reset` before the next one.
        """
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a step and return what it sampled, in the plan's rows. Each handle once.

        Raises:
          StepFailedError: this step, or one that it builds on, failed; `reset` before the next one.
        """
        ...

    def reset(self) -> None:
        """New, empty pages: after a failed step nothing on the device can be trusted but the weights.

        Its transfers forget what is in flight as well; what host slots hold already stays good.

        Raises:
          StepFailedError: the device has no memory for them; `reset` again before the next step.
        """
        ...

    @property
    def num_compilations(self) -> int:
        """Compilations in this process, by anybody, since the runner was made."""
        ...

    def memory_analysis(self) -> dict[str, Any]:
        """Bytes per device, in all and per bucket; empty where nothing is known."""
        ...
