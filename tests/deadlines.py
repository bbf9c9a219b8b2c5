"""Waiting for what happens elsewhere: until it has, or far too late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TIMEOUT_S = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    """Return once it holds; fail where it never does."""
    deadline_s = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        pause.wait(0.002)
