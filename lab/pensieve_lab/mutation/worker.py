"""A process that imports what every run of pytest needs and forks one process for each run.

    python -m pensieve_lab.mutation.worker MODULE ...

Owns: forking, time limits, and the end of all processes that a run leaves behind.
Does not know: mutants, or which tests are worth running.
Called by `mutation.pool`, which starts it as a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, Final

import pytest

from pensieve_lab.mutation.pytest_process import EXIT_OWN_FAULT, Job, run

_PR_SET_CHILD_SUBREAPER: Final = 36
_COLLECTION_S: Final = 300.0
_DEFAULT_TEST_S: Final = 900.0
_PASSED: Final = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def main(modules: list[str]) -> None:
    """Answer jobs until the input ends."""
    # Processes that a test starts and leaves behind become children of this one, which ends them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    for module in modules:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_plugins()
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


def _import_plugins() -> None:
    """Make pytest import its plugins, by a run without tests."""
    with (
        tempfile.TemporaryDirectory() as empty,
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
    ):
        pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={empty}", empty])


def answer(job: Job) -> dict[str, Any]:
    """Run one job, and return its outcome: "passed", "failed" or "hung", the test and the reason."""
    scratch = Path(job["scratch"])
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    start = time.monotonic()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        try:
            run(job, write_fd)
        except BaseException:
            traceback.print_exc()
        os._exit(EXIT_OWN_FAULT)
    os.close(write_fd)
    result = _RunWatcher(job).follow(read_fd, pid)
    os.close(read_fd)
    if result["outcome"] == "hung":
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    _end_children()
    code = os.waitstatus_to_exitcode(status)
    if code == EXIT_OWN_FAULT:
        raise RuntimeError((scratch / "log").read_text("utf-8") if (scratch / "log").exists() else "no log")
    if result["outcome"] == "passed" and not result.pop("has_ended"):
        result |= {"outcome": "failed", "reason": f"the process ended early with status {code}"}
    if result["outcome"] == "passed" and "tests" in job and code not in _PASSED:
        result |= {"outcome": "failed", "reason": f"pytest could not run: it ended with status {code}"}
    recorded = scratch / "recorded.json"
    if recorded.is_file():
        result["recorded"] = json.loads(recorded.read_text("utf-8"))
    return result | {"status": code, "seconds": round(time.monotonic() - start, 2)}


class _RunWatcher:
    """Watcher of one run's reports, which detects a test that takes too long."""

    def __init__(self, job: Job) -> None:
        self._limits: dict[str, float] = dict(zip(job.get("tests", ()), job.get("limits", ()), strict=True))
        self._is_recording = "packages" in job
        self._deadline = time.monotonic() + _COLLECTION_S
        self._result: dict[str, Any] = {
            "outcome": "passed",
            "test": "",
            "reason": "",
            "num_run": 0,
            "has_ended": False,
        }

    def follow(self, fd: int, pid: int) -> dict[str, Any]:
        """Return the outcome when a test takes too long or the process ends."""
        pid_fd = os.pidfd_open(pid)
        os.set_blocking(fd, False)
        buffer = b""
        try:
            while True:
                ready, _, _ = select.select([fd, pid_fd], [], [], max(self._deadline - time.monotonic(), 0.0))
                if not ready:
                    return self._result | {"outcome": "hung", "reason": "time-out"}
                data = os.read(fd, 1 << 16) if fd in ready else b""
                *rows, buffer = (buffer + data).split(b"\n")
                for row in rows:
                    self._note(*json.loads(row))
                if not data:
                    return self._result
        finally:
            os.close(pid_fd)

    def _note(self, kind: str, test: str, reason: str = "") -> None:
        if kind == "start":
            self._deadline = time.monotonic() + self._limits.get(test, _DEFAULT_TEST_S)
            self._result |= {"test": test, "num_run": self._result["num_run"] + 1}
        elif kind == "end":
            self._result["has_ended"] = True
        elif self._result["outcome"] == "passed" and not self._is_recording:
            self._result |= {"outcome": "failed", "test": test, "reason": reason}


def _end_children() -> None:
    """End processes that a run left behind, and their descendants."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
