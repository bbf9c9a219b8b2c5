"""How long a server's event loop and its engine's thread are held, by processor time.

Owns: the timers of both processes, their files, and the longest slices of a span of time.
Does not know: what clients send, or what a part of the loop does.

Processor time is not that of other programs on the same machine, unlike the gaps of a stream. Three kinds of
slices are noted:

- `loop`: processor time of the event loop's thread between two ticks of a timer. No other request is handled
  meanwhile.
- `wait`: how late a tick came, but at most the processor time of the whole process meanwhile. So it includes
  what other threads did while they held the interpreter's lock.
- parts of the engine's loop by name: processor time of the engine's thread, without that of parts within.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

DIRECTORY_VARIABLE: Final = "PENSIEVE_LAB_SLICES"
_SHORTEST_S: Final = 0.005
_TICK_S: Final = 0.002


class Slice(NamedTuple):
    """A slice of time during which a thread was held.

    Attributes:
      end_s: when it ended, by `time.monotonic`, which all processes of a machine share.
      part: what was done.
      seconds: its processor time.
    """

    end_s: float
    part: str
    seconds: float


class SliceLog:
    """Slices of one process, each a line of a file; short ones are left out."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, part: str, seconds: float) -> None:
        """Note a slice that ends now, unless it is short."""
        if seconds >= _SHORTEST_S:
            line = json.dumps([time.monotonic(), part, round(seconds, 5)])
            os.write(self._descriptor, f"{line}\n".encode())


def read_slices(directory: Path) -> list[Slice]:
    """Return the slices of all processes so far."""
    found = []
    for file in sorted(directory.iterdir()):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        found += [Slice(*json.loads(line)) for line in lines if line.endswith("\n")]
    return found


def longest_ms(slices: Iterable[Slice], begin_s: float, end_s: float) -> dict[str, float]:
    """Return the longest slice of each part that ended within a span of time, in ms."""
    found: dict[str, float] = {}
    for one in slices:
        if begin_s <= one.end_s <= end_s:
            found[one.part] = max(found.get(one.part, 0.0), round(1e3 * one.seconds, 1))
    return found


class LoopTimer:
    """A timer that ticks on an event loop and notes how long the loop was held between two ticks."""

    def __init__(self, log: SliceLog) -> None:
        self._log = log
        self._last = (0.0, 0.0, 0.0)

    def wrap(
        self, new_loop: Callable[[], asyncio.AbstractEventLoop]
    ) -> Callable[[], asyncio.AbstractEventLoop]:
        """Return a function that makes an event loop with this timer."""

        def timed() -> asyncio.AbstractEventLoop:
            loop = new_loop()
            loop.call_soon(self._begin, loop)
            return loop

        return timed

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._last = _clocks()
        loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = _clocks()
        wall_s, thread_s, process_s = (one - before for one, before in zip(now, self._last, strict=True))
        self._log.add("loop", thread_s)
        self._log.add("wait", min(wall_s - _TICK_S, process_s))
        self._begin(loop)


class PartTimer:
    """Processor times of methods, each without that of timed methods that it calls."""

    def __init__(self, log: SliceLog, now_s: Callable[[], float] = time.thread_time) -> None:
        self._log = log
        self._now_s = now_s
        self._inner_s = 0.0

    def time_methods(self, kind: type[Any], names: Sequence[str]) -> None:
        """Replace methods of a class by timed ones, which have their names in the log."""
        for name in names:
            setattr(kind, name, self._timed(f"{kind.__name__}.{name}", getattr(kind, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer_s, self._inner_s = self._inner_s, 0.0
            began_s = self._now_s()
            try:
                return method(*args, **kwargs)
            finally:
                whole_s = self._now_s() - began_s
                self._log.add(part, whole_s - self._inner_s)
                self._inner_s = outer_s + whole_s

        return timed


def _clocks() -> tuple[float, float, float]:
    return time.monotonic(), time.thread_time(), time.process_time()
