"""Virtual time: the host's clock, and when the device will be free.

Owns: the two times that everything in a simulation is placed on.
Does not know: what takes the time.
"""

from __future__ import annotations


class Timeline:
    """One machine's time; a `Clock` for the cache.

    Attributes:
      device_free_s: when everything that was dispatched to the device will have ended.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        """At `start_s`, with an idle device."""
        self._now_s = start_s
        self.device_free_s = start_s

    def now(self) -> float:
        """Seconds, as the host's thread sees them."""
        return self._now_s

    def advance(self, delta_s: float) -> None:
        """The host is busy for `delta_s` seconds."""
        assert delta_s >= 0, f"{delta_s} s: a clock only moves forward"
        self._now_s += delta_s

    def advance_to(self, time_s: float) -> None:
        """The host waits until `time_s`, if that is not past."""
        if time_s > self._now_s:
            self._now_s = time_s

    def use_device(self, seconds: float) -> None:
        """The device computes for `seconds` behind everything that was dispatched, not before now."""
        self.device_free_s = max(self._now_s, self.device_free_s) + seconds

    def occupy_device(self, until_s: float) -> None:
        """What is dispatched to the device from here on begins no earlier than `until_s`."""
        if until_s > self.device_free_s:
            self.device_free_s = until_s
