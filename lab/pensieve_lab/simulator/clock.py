"""Virtual time: the host's clock, and when the device will be free.

Owns: the two times that order everything in a simulation.
Does not know: what takes the time.
"""

from __future__ import annotations

from pensieve_jax.core.clock import VirtualClock


class Timeline(VirtualClock):
    """Time of one machine: the host's, as a `Clock` for the cache, and its device's.

    Attributes:
      device_free_s: when all work dispatched to the device will have ended.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        """Start at `start_s` with an idle device."""
        super().__init__(start_s)
        self.device_free_s = start_s

    def use_device(self, seconds: float) -> None:
        """Occupy the device for `seconds` after everything dispatched before, not before now."""
        self.device_free_s = max(self._now_s, self.device_free_s) + seconds

    def occupy_device(self, until_s: float) -> None:
        """Let later work on the device begin no earlier than `until_s`."""
        if until_s > self.device_free_s:
            self.device_free_s = until_s
