"""Log lines about a history that fails, at most one a minute for each reason.

Owns: how often the same failure is logged.
Does not know: who used the history, or what they are told. Clients never see these messages, which name files
and databases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from pensieve_jax.core.errors import HistoryError

PERIOD_S: Final = 60.0
_log = logging.getLogger(__name__)


class FailureLog:
    """The failures of one history that were logged. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is a clock in seconds."""
        self._now = now
        self._mutex = threading.Lock()
        self._message = ""
        self._logged_s = 0.0

    def note(self, error: HistoryError) -> None:
        """Log an error, unless the same one was logged within the last minute."""
        now_s, message = self._now(), str(error)
        with self._mutex:
            if message == self._message and now_s - self._logged_s < PERIOD_S:
                return
            self._message, self._logged_s = message, now_s
        _log.error("%s", message)
