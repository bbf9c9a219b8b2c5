"""Time as the engine sees it: the wall clock, or one that a test or a simulator moves by hand.

Owns: that time never goes back. Does not know: what is timed.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds. The scheduler and the cache never read the time from anywhere else."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never decreases."""
        ...


class WallClock:
    """Seconds since the epoch, so that activity times survive a restart in the history store."""

    def __init__(self) -> None:
        """Start with the first reading."""
        self._latest_s = 0.0

    def now(self) -> float:
        """Seconds since the epoch, held still where the system clock is set back."""
        self._latest_s = max(self._latest_s, time.time())
        return self._latest_s


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start at `start_s` seconds."""
        self._now_s = start_s

    def now(self) -> float:
        """The current virtual time in seconds."""
        return self._now_s

    def advance(self, delta_s: float) -> None:
        """Move forward by `delta_s` seconds; `ValueError` where that is negative."""
        if delta_s < 0:
            raise ValueError(f"delta_s is {delta_s}: a clock only moves forward")
        self._now_s += delta_s

    def advance_to(self, time_s: float) -> None:
        """Move forward to `time_s`, if that is not past."""
        if time_s > self._now_s:
            self._now_s = time_s
