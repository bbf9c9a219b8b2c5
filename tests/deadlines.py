"""Waiting for events of other threads or processes, with a limit that only ends a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TIMEOUT_S = 120.0
"""Limit of a wait. A busy machine stops a process for seconds, and a test's own limit is minutes."""


def wait_until(condition: Callable[[], object], *, every_s: float = 0.002) -> None:
    """Return once the condition holds; fail if it never does."""
    deadline_s = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        pause.wait(every_s)
