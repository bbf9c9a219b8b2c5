"""Subprocesses with a time limit.

Owns: the start of a command as a process of its own, polling, its end with all its children, and the tail of
its output.
Does not know: what it measures.
Called by `programs.profile_parallel` and `programs.run_figure11`.
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

_POLL_S = 1.0
_TAIL_BYTES = 2000


class ProcessResult(NamedTuple):
    """Result of a process.

    Attributes:
      wall_s: run time.
      failed: description of the failure; None if it exited with status 0.
      status: its exit status; None if it was killed.
      output: after a failure, the end of its output.
    """

    wall_s: float
    failed: str | None
    status: int | None
    output: str


def run_with_limit(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> ProcessResult:
    """Run a command to its end, or kill it after `limit_s`; call `meanwhile` every second and at the end."""
    start_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # A separate session, so that the command is killed with all its children, and Ctrl-C reaches only
        # this process.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
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
            return ProcessResult(wall_s, None, 0, "")
        failed = f"took longer than {limit_s:.0f} s" if status is None else f"ended with status {status}"
        return ProcessResult(wall_s, failed, status, _tail(output))


def _wait(process: subprocess.Popen[bytes], until_s: float, meanwhile: Callable[[], object]) -> int | None:
    """Return its status, or None after the time limit."""
    while (left_s := until_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left_s, _POLL_S))
        meanwhile()
    return None


def _end(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Exit on SIGTERM, so that the started session is killed as well."""
    raise SystemExit(128 + signal_number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, which may outlive it; do nothing if all have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(output: IO[bytes]) -> str:
    output.seek(max(output.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
    return output.read().decode(errors="replace")
