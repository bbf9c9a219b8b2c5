"""Interface to a device, which executes launches and returns the sampled tokens.

Owns: the protocol.
Does not know: its implementations (`device.runner`, `simulation`, a fake in the tests).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from pensieve_jax.decoding.sampling_rows import StepResult
from pensieve_jax.rebatching.launches import Launch


class RebatchingRunner(Protocol):
    """Executor of launches in program order. It is called from one thread."""

    def launch(self, launch: Launch) -> Any:
        """Begin a launch; return a handle if it samples, else None.

        The call blocks for a `Park` with `waits`, and may block for a `Resize`. Other launches do not block.

        Raises:
          StepFailedError: the launch could not begin; the device state is invalid until `reset`. A `FreeRow`
            never raises it.
        """
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a launch, and return what it sampled.

        Raises:
          StepFailedError: the launch failed; the device state is invalid until `reset`.
        """
        ...

    def has_left(self, serial: int) -> bool:
        """Return whether a row's copy to host memory is done and its device memory is free."""
        ...

    def reset(self, kept_serials: Collection[int]) -> None:
        """Discard the ring and all rows except those of `kept`, which are in host memory."""
        ...
