"""The clock of a benchmark run: time 0 is when its clients may send.

Owns: the origin that arrivals, answers and the engine's cache share.
Does not know: who reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """Seconds of a run. Before `start` the clock stands at the past time that `go_to` set.

    So a history that is cached before the run has the age that it would have in a run that began long ago.
    """

    def __init__(
        self,
        timer: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start far in the past. `timer` counts seconds from any origin; `sleep` waits for a number of
        them."""
        self._timer = timer
        self._sleep = sleep
        self._past_s = -1e9
        self._origin_s: float | None = None

    def now(self) -> float:
        """Return the seconds since `start`; negative before it."""
        return self._past_s if self._origin_s is None else self._timer() - self._origin_s

    def at(self, reading_s: float) -> float:
        """Convert a reading of the timer into seconds since `start`."""
        assert self._origin_s is not None, "the run has not begun"
        return reading_s - self._origin_s

    def go_to(self, time_s: float) -> None:
        """Move the clock to `time_s` <= 0 before the run; it never goes back."""
        assert self._origin_s is None and time_s <= 0
        self._past_s = max(self._past_s, time_s)

    def start(self) -> None:
        """Begin the run at time 0."""
        self._origin_s = self._timer()

    def sleep_until(self, time_s: float) -> None:
        """Sleep until `time_s`, unless it has passed."""
        left_s = time_s - self.now()
        if left_s > 0:
            self._sleep(left_s)
