"""Running a client's programs in a process, one after the other.

Owns: the process, the time limit of each program, and the going on behind one that hangs or ends the process.
Does not know: clients, servers, or why a program failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

MARK: Final = "@trial "
"""Beginning of a line for this process; see `client_programs/trial.py`."""
_TAIL: Final = 600
_START_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that ended.

    Attributes:
      name: its kind and name, such as "tool: Agent".
      problem: None if it passed.
      is_late: it was killed at its time limit.
      seconds: how long it took.
    """

    name: str
    problem: str | None
    is_late: bool
    seconds: float


class NotStartedError(Exception):
    """The process ended before it named its programs; the text is the end of its output."""


def run_programs(
    command: Sequence[str], arguments: Sequence[str], timeout_s: float, environment: Mapping[str, str]
) -> Iterator[Ended]:
    """Run all programs of a file, and yield each as it ends; the next one begins when the caller goes on.

    A program that exceeds `timeout_s` is killed; the others then run in a new process.

    Args:
      command: runs the file.
      arguments: the server's URL and the model.
      timeout_s: of each program; a start may take longer, since it imports a library.
      environment: variables beside those of this process.

    Raises NotStartedError.
    """
    wanted: list[str] | None = None
    while wanted is None or wanted:
        with _Process([*command, *arguments], environment) as process:
            known = process.next_line(_START_S)
            if known is None:
                raise NotStartedError(process.output_tail())
            if wanted is None:
                wanted = list(known["programs"])
            while wanted:
                ended = _run(process, wanted.pop(0), timeout_s)
                yield ended
                if not process.is_running:
                    break


def _run(process: _Process, name: str, timeout_s: float) -> Ended:
    """Run one program; a process that has no answer in time is killed."""
    begun_s = time.monotonic()
    process.write_line(name)
    answer = process.next_line(timeout_s)
    seconds = time.monotonic() - begun_s
    if answer is not None:
        return Ended(name, answer["problem"], False, seconds)
    if process.is_running:
        process.kill()
        return Ended(name, f"no end within {timeout_s:g} s", True, seconds)
    return Ended(name, process.output_tail(), False, seconds)


class _Process:
    """A process in a group of its own, which is killed at the end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `__exit__` closes it
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**inherited, **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def write_line(self, line: str) -> None:
        """Write a line to the process; one that has ended reads nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill all processes of the group."""
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def next_line(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line for this process; None after `timeout_s`, or if the process ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line is None:
            self._process.wait()
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def output_tail(self) -> str:
        """Return the end of what the process wrote to stderr."""
        self._errors.seek(0)
        tail = " ".join(self._errors.read()[-_TAIL:].split())
        return f"the process ended with status {self._process.poll()}: {tail}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line.removeprefix(MARK))
        self._lines.put(None)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a line that was never read
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()
