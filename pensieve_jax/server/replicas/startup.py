"""What somebody is told of replicas: while they start, and then of those that go and come.

Owns: which news is worth a line, in which words, and that silence of a start never lasts long.
Does not know: Ray, where the news comes from, or how a line is written.
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

LOOK_S: Final = 0.5
SILENCE_S: Final = 15.0
_NUMBER: Final = re.compile(r"\d+")
_PATIENCE_S: Final = 5.0
"""For the last look of the thread, which asks Serve."""


class Seen(NamedTuple):
    """How far a start has come.

    Attributes:
      num_ready: replicas that are.
      is_front_ready: so is the front.
      problem: what Serve says is in the way of either; "": nothing.
    """

    num_ready: int
    is_front_ready: bool
    problem: str = ""


class StartReport:
    """Lines about one start."""

    def __init__(
        self, num_replicas: int, say: Callable[[str], object], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """The start begins now; `say` takes a line."""
        self._num_replicas = num_replicas
        self._say, self._now_s = say, now_s
        self._began_s = self._said_s = now_s()
        self._num_ready = 0
        self._problems: set[str] = set()

    def see(self, seen: Seen) -> None:
        """Say what is new; without news, every `SILENCE_S`, what is waited for."""
        for number in range(self._num_ready + 1, seen.num_ready + 1):
            self._tell(f"replica {number} of {self._num_replicas} is ready, after {self._passed}")
        kind = _NUMBER.sub("", seen.problem)  # how often something is tried again is no news
        if kind and kind not in self._problems:
            self._problems.add(kind)
            self._tell(seen.problem)
        if seen.num_ready < self._num_ready:
            self._tell(f"a replica is gone again: {seen.num_ready} of {self._num_replicas} are ready")
        self._num_ready = seen.num_ready
        if self._now_s() - self._said_s >= SILENCE_S:
            self._tell(f"waiting for {self._what_is_left(seen)}, {self._passed} so far")

    # Inside

    def _what_is_left(self, seen: Seen) -> str:
        left = range(seen.num_ready + 1, self._num_replicas + 1)
        if not left:
            return "Serve" if seen.is_front_ready else "the front"
        if len(left) == 1:
            return f"replica {left[0]} of {self._num_replicas}, which loads the model or compiles"
        return f"replicas {left[0]} to {left[-1]} of {self._num_replicas}, which load the model or compile"

    @property
    def _passed(self) -> str:
        return f"{self._now_s() - self._began_s:.0f} s"

    def _tell(self, line: str) -> None:
        self._said_s = self._now_s()
        self._say(line)


class ReplicaMonitor:
    """Lines about an application that serves."""

    def __init__(self, num_replicas: int, say: Callable[[str], object]) -> None:
        """All are there; `say` takes a line."""
        self._num_wanted = self._num_there = num_replicas
        self._is_front_there = True
        self._say = say

    def see(self, seen: Seen) -> None:
        """Say what has changed."""
        if seen.num_ready != self._num_there:
            self._say(f"{seen.num_ready} of {self._num_wanted} replicas are there; {self._num_there} were")
            self._num_there = seen.num_ready
        if seen.is_front_ready != self._is_front_there:
            self._say("the front is there again" if seen.is_front_ready else "the front is gone")
            self._is_front_there = seen.is_front_ready


@contextmanager
def watching(attendance: ReplicaMonitor, look: Callable[[], Seen | None], every_s: float) -> Iterator[None]:
    """Have a thread look, and tell, until the block is left; nobody waits for it, as a look may take long."""
    with _thread_that_looks(_Looking(look), attendance.see, every_s, patience_s=0.0):
        yield


@contextmanager
def telling(report: StartReport, look: Callable[[], Seen | None]) -> Iterator[None]:
    """Have a thread look, and tell, until the block is left; None where there was nothing to see."""
    looking = _Looking(look)
    with _thread_that_looks(looking, report.see, LOOK_S, patience_s=_PATIENCE_S):
        yield
    seen = looking()
    if seen is not None:
        report.see(seen)


@contextmanager
def _thread_that_looks(
    looking: _Looking, see: Callable[[Seen], None], every_s: float, *, patience_s: float
) -> Iterator[None]:
    """Until the block is left, and then waited for as long as `patience_s`; it tells nothing any more."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(every_s):
            seen = looking()
            if seen is not None and not is_over.is_set():
                see(seen)

    thread = threading.Thread(target=work, name="looking at replicas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(patience_s)


class _Looking:
    """Looks that may fail: no start depends on what is told of it."""

    def __init__(self, look: Callable[[], Seen | None]) -> None:
        """None has failed yet."""
        self._look = look
        self._has_failed = False

    def __call__(self) -> Seen | None:
        """None where it failed, which is logged once."""
        try:
            return self._look()
        except Exception as error:  # of Serve, which documents none
            if not self._has_failed:
                self._has_failed = True
                _log.warning("how far the start has come cannot be seen: %r", error)
            return None


def problem_in_words(deployment: str, message: str) -> str:
    """What Serve says of a deployment, in a line: without the trace between its first words and the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines or "slow __init__" in message:  # that it takes longer than half a minute
        return ""
    last = "" if len(lines) == 1 else f" {lines[-1]}"
    return f"{deployment}: {lines[0]}{last}"
