"""The door to a device: what carries out launches, and gives the tokens that they sampled.

Owns: the protocol.
Does not know: who implements it (`device.runner`, `simulation`, a fake of tests).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from pensieve_jax.decoding.sampling_rows import StepResult
from pensieve_jax.rebatching.launches import Launch


class RebatchingRunner(Protocol):
    """Carries out launches in program order, from one thread."""

    def launch(self, launch: Launch) -> Any:
        """Begin one; returns a handle for what samples, else None.

        It waits for a `Park` that says so, and may for a `Resize`; for nothing else.

        Raises:
          StepFailedError: it could not be begun; nothing on the device can be trusted until `reset`. Never
            for a `FreeRow`, which only forgets.
        """
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Wait for a launch, and return what it sampled.

        Raises:
          StepFailedError: it failed; nothing on the device can be trusted until `reset`.
        """
        ...

    def has_left(self, serial: int) -> bool:
        """The copy of a row to host memory is done, and its device memory is free."""
        ...

    def reset(self, kept: Collection[int]) -> None:
        """Forget the ring and all rows but those of `kept`, which are in host memory."""
        ...
