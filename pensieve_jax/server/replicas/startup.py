"""Reports the progress of replicas: their start, and later the loss and return of replicas.

Owns: the choice and wording of the lines, and the longest interval without a line during a start.
Does not know: Ray, the source of the status, or how a line is written.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

_log = logging.getLogger(__name__)

POLL_S: Final = 0.5
SILENCE_S: Final = 15.0
_NUMBER: Final = re.compile(r"\d+")
_PATIENCE_S: Final = 5.0
"""How long to wait for the last query of the thread, which asks Serve."""


class AppStatus(NamedTuple):
    """Status of the application.

    Attributes:
      num_ready: the number of ready replicas.
      is_front_ready: whether the front end is ready.
      problem: Serve's message about a failing replica or front end, or "".
    """

    num_ready: int
    is_front_ready: bool
    problem: str = ""


class StartReport:
    """Progress lines of one start."""

    def __init__(
        self, num_replicas: int, say: Callable[[str], object], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin the report of a start that begins now; `say` writes a line."""
        self._num_replicas = num_replicas
        self._say, self._now_s = say, now_s
        self._began_s = self._reported_s = now_s()
        self._num_ready = 0
        self._problems: set[str] = set()

    def update(self, status: AppStatus) -> None:
        """Report changes of the status; without any for `SILENCE_S` seconds, report what is missing."""
        for number in range(self._num_ready + 1, status.num_ready + 1):
            self._tell(f"replica {number} of {self._num_replicas} is ready, after {self._passed}")
        kind = _NUMBER.sub("", status.problem)  # a new retry count alone is not reported
        if kind and kind not in self._problems:
            self._problems.add(kind)
            self._tell(status.problem)
        if status.num_ready < self._num_ready:
            self._tell(f"a replica was lost: {status.num_ready} of {self._num_replicas} are ready")
        self._num_ready = status.num_ready
        if self._now_s() - self._reported_s >= SILENCE_S:
            self._tell(f"waiting for {self._what_is_left(status)}, {self._passed} so far")

    # Private methods

    def _what_is_left(self, status: AppStatus) -> str:
        left = range(status.num_ready + 1, self._num_replicas + 1)
        if not left:
            return "Serve" if status.is_front_ready else "the front end"
        if len(left) == 1:
            return f"replica {left[0]} of {self._num_replicas}, which loads the model or compiles"
        return f"replicas {left[0]} to {left[-1]} of {self._num_replicas}, which load the model or compile"

    @property
    def _passed(self) -> str:
        return f"{self._now_s() - self._began_s:.0f} s"

    def _tell(self, line: str) -> None:
        self._reported_s = self._now_s()
        self._say(line)


class ReplicaMonitor:
    """Lines about replicas and front end that are lost or return while the application serves."""

    def __init__(self, num_replicas: int, say: Callable[[str], object]) -> None:
        """Begin with all replicas and the front end ready; `say` writes a line."""
        self._num_wanted = self._num_there = num_replicas
        self._is_front_there = True
        self._say = say

    def update(self, status: AppStatus) -> None:
        """Report changes of the status."""
        if status.num_ready != self._num_there:
            self._say(
                f"{status.num_ready} of {self._num_wanted} replicas are ready; before: {self._num_there}"
            )
            self._num_there = status.num_ready
        if status.is_front_ready != self._is_front_there:
            self._say("the front end is ready again" if status.is_front_ready else "the front end was lost")
            self._is_front_there = status.is_front_ready


@contextmanager
def monitoring(
    monitor: ReplicaMonitor, read_status: Callable[[], AppStatus | None], every_s: float
) -> Iterator[None]:
    """Report changes from a thread until the block is left, without waiting for a query in progress."""
    with _status_thread(_StatusQuery(read_status), monitor.update, every_s, patience_s=0.0):
        yield


@contextmanager
def reporting_start(report: StartReport, read_status: Callable[[], AppStatus | None]) -> Iterator[None]:
    """Report a start from a thread until the block is left, and once more at the end."""
    query = _StatusQuery(read_status)
    with _status_thread(query, report.update, POLL_S, patience_s=_PATIENCE_S):
        yield
    status = query()
    if status is not None:
        report.update(status)


@contextmanager
def _status_thread(
    query: _StatusQuery, update: Callable[[AppStatus], None], every_s: float, *, patience_s: float
) -> Iterator[None]:
    """Run a thread that queries and reports until the block is left, then join it for up to `patience_s`.

    After the block, the thread reports nothing more.
    """
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(every_s):
            status = query()
            if status is not None and not is_over.is_set():
                update(status)

    thread = threading.Thread(target=work, name="replica-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(patience_s)


class _StatusQuery:
    """Status query that returns None instead of an error, because a start must not depend on its report."""

    def __init__(self, read_status: Callable[[], AppStatus | None]) -> None:
        """Wrap the query `read_status`."""
        self._read_status = read_status
        self._has_failed = False

    def __call__(self) -> AppStatus | None:
        """Return the status, or None if the query failed; only the first failure is logged."""
        try:
            return self._read_status()
        except Exception as error:  # Serve does not document its exceptions
            if not self._has_failed:
                self._has_failed = True
                _log.warning("the status of the replicas is unknown: %r", error)
            return None


def problem_in_words(deployment: str, message: str) -> str:
    """Return Serve's message about a deployment as one line, without the traceback in its middle."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines or "slow __init__" in message:  # a start that takes longer than half a minute is normal
        return ""
    last = "" if len(lines) == 1 else f" {lines[-1]}"
    return f"{deployment}: {lines[0]}{last}"
