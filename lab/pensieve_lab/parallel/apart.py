"""A command as a process of its own, which may take so long and no longer.

Owns: its start, looking in on it meanwhile, its end with all that it started, and what it said last.
Does not know: what it measures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO, NamedTuple, NoReturn

_LOOK_S = 1.0  # between two looks in on it
_TAIL_BYTES = 2000


class Ended(NamedTuple):
    """How it ended.

    Attributes:
      wall_s: how long it ran.
      failed: what went wrong, in words; None: it ended with status 0.
      status: what it ended with; None where it was killed.
      output: where it failed, the last of what it said.
    """

    wall_s: float
    failed: str | None
    status: int | None
    output: str


def run_apart(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> Ended:
    """Run it to its end, or kill it after `limit_s`; `meanwhile` is called every second, and after it."""
    start_s = time.monotonic()
    with tempfile.TemporaryFile() as said:
        # A session of its own: it is killed with whatever it started, and Ctrl-C is this process's alone.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        before = signal.signal(signal.SIGTERM, _end)
        try:
            status = _wait(process, start_s + limit_s, meanwhile)
        finally:
            _kill(process)
            signal.signal(signal.SIGTERM, before)
        wall_s = time.monotonic() - start_s
        meanwhile()
        if status == 0:
            return Ended(wall_s, None, 0, "")
        failed = f"took longer than {limit_s:.0f} s" if status is None else f"ended with status {status}"
        return Ended(wall_s, failed, status, _tail(said))


def _wait(process: subprocess.Popen[bytes], until_s: float, meanwhile: Callable[[], object]) -> int | None:
    """Its status, or None once it is late."""
    while (left_s := until_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left_s, _LOOK_S))
        meanwhile()
    return None


def _end(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Whoever ends this process ends what it has started, too, which is in a session of its own."""
    raise SystemExit(128 + signal_number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and what it started, which may outlive it; nothing where all have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(said: IO[bytes]) -> str:
    said.seek(max(said.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
    return said.read().decode(errors="replace")
