"""Time as the engine sees it: the wall clock, or one that a test or a simulator moves.

Owns: the guarantee that time never goes back. Does not know: what is timed.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds, and the only one that the scheduler and the cache use."""

    def now(self) -> float:
        """Return seconds since an arbitrary origin; never decreases."""
        ...


class WallClock:
    """Seconds since the epoch, so that activity times in the history store are valid after a restart."""

    def __init__(self) -> None:
        """Start without a reading."""
        self._latest_s = 0.0

    def now(self) -> float:
        """Return seconds since the epoch; the value stands still if the system clock is set back."""
        self._latest_s = max(self._latest_s, time.time())
        return self._latest_s


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start at `start_s` seconds."""
        self._now_s = start_s

    def now(self) -> float:
        """Return the current virtual time in seconds."""
        return self._now_s

    def advance(self, delta_s: float) -> None:
        """Move forward by `delta_s` seconds; raise ValueError if it is negative."""
        if delta_s < 0:
            raise ValueError(f"delta_s is {delta_s}; it must be at least 0, since time never goes back")
        self._now_s += delta_s

    def advance_to(self, time_s: float) -> None:
        """Move forward to `time_s`; do nothing if that is past."""
        if time_s > self._now_s:
            self._now_s = time_s
