"""Time as the engine sees it: the wall clock, a clock that never goes back, or one that a test moves.

Owns: what happens when the system clock is set back. Does not know: what is timed.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Protocol

_log = logging.getLogger(__name__)
MAX_HOLD_S: Final = 60.0
"""The wall clock stands still for at most this time after the system clock was set back."""


class Clock(Protocol):
    """A source of seconds."""

    def now(self) -> float:
        """Return seconds since an arbitrary origin."""
        ...


class WallClock:
    """Seconds since the epoch, for times that are stored and shown."""

    def __init__(self, read_s: Callable[[], float] = time.time) -> None:
        """Start without a reading of the system clock `read_s`."""
        self._read_s = read_s
        self._latest_s = 0.0

    def now(self) -> float:
        """Return seconds since the epoch.

        If the system clock is set back by up to `MAX_HOLD_S`, the value stands still until the clock has
        caught up, so that small corrections change no order. Beyond that it follows the clock back: a clock
        that was days ahead for a moment must not date everything days ahead.
        """
        now_s = self._read_s()
        if now_s < self._latest_s:
            if self._latest_s - now_s <= MAX_HOLD_S:
                return self._latest_s
            _log.warning(
                "the system clock was set back from %s to %s, and times follow it",
                utc_text(self._latest_s),
                utc_text(now_s),
            )
        self._latest_s = now_s
        return now_s


class SteadyClock:
    """Seconds that never go back or jump, for the order of the cache.

    They begin with the system clock's time. The time while the machine sleeps counts.
    """

    def __init__(self, start_s: float | None = None, elapsed_s: Callable[[], float] | None = None) -> None:
        """Start at `start_s`, by default the system clock's time; `elapsed_s` only ever increases."""
        self._elapsed_s = elapsed_s or time_since_boot
        self._offset_s = (time.time() if start_s is None else start_s) - self._elapsed_s()

    def now(self) -> float:
        """Return seconds, close to those since the epoch unless the system clock was set since the start."""
        return self._offset_s + self._elapsed_s()


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


def time_since_boot() -> float:
    """Return seconds that only ever increase; if the system has them, with those while the machine slept."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if number is None else time.clock_gettime(number)


def utc_text(time_s: float) -> str:
    """Return a time since the epoch in words, such as `2026-11-30T08:00:00Z`."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{time_s:.0f} s since 1970"
