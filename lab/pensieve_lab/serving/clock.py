"""The time of one run of a benchmark: 0 is when its clients may send.

Owns: the one origin that arrivals, answers and the engine's cache share.
Does not know: who reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """Seconds of a run. Before `start` it stands where `go_to` put it, in the past.

    What is put into a cache before the run is as old there as it would be, had the run begun long ago.
    """

    def __init__(
        self,
        timer: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Far in the past. `timer` counts seconds from any origin, `sleep` waits for some of them."""
        self._timer = timer
        self._sleep = sleep
        self._past_s = -1e9
        self._origin_s: float | None = None

    def now(self) -> float:
        """Seconds since `start`; below 0 before it."""
        return self._past_s if self._origin_s is None else self._timer() - self._origin_s

    def at(self, reading_s: float) -> float:
        """When the timer read `reading_s`, in seconds since `start`."""
        assert self._origin_s is not None, "the run has not begun"
        return reading_s - self._origin_s

    def go_to(self, time_s: float) -> None:
        """Before the run: it is `time_s` now, at most 0, unless it is later already."""
        assert self._origin_s is None and time_s <= 0
        self._past_s = max(self._past_s, time_s)

    def start(self) -> None:
        """The run begins."""
        self._origin_s = self._timer()

    def sleep_until(self, time_s: float) -> None:
        """Wait, if `time_s` is not past."""
        left_s = time_s - self.now()
        if left_s > 0:
            self._sleep(left_s)
