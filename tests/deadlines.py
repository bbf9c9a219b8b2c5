"""Waiting for events of other threads or processes, with a generous limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TIMEOUT_S = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    """Return once the condition holds; fail if it never does."""
    deadline_s = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        pause.wait(0.002)
