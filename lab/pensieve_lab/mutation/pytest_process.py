"""One run of pytest in a process of its own, and its results.

Owns: the forked process: its folder, paths, limits and pytest plugins, and the lines that it reports.
Does not know: mutants, or which tests are worth running.
Called by `mutation.worker`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from pensieve_lab.mutation.line_monitor import LINES_PACKAGES, LINES_ROOT
from pensieve_lab.mutation.recording import Recorder

COMPILATION_CACHE: Final = "TESTS_COMPILATION_CACHE"  # read by `tests.launching`
MAX_DATA_BYTES: Final = 8 << 30  # a mutant that allocates without end fails instead of filling the machine
EXIT_OWN_FAULT: Final = 70
_PR_SET_PDEATHSIG: Final = 1
_ARGUMENTS: Final = (
    *("-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not long and not gpu"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plugins have been imported before the fork
)


# `root`, `scratch` and `files`, with `tests` and their `limits` to run, or with `packages` to record.
type Job = dict[str, Any]


class SelectedTests:
    """Pytest plugin that runs given tests in the given order and reports each before it runs."""

    def __init__(self, tests: Sequence[str], fd: int) -> None:
        """Take the tests to run and the descriptor that reports are written to."""
        self._places = {test: place for place, test in enumerate(tests)}
        self._fd = fd

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect all other tests; without a list run all."""
        if not self._places:
            return
        missing = self._places.keys() - {item.nodeid for item in items}
        # A mutant may change the parameters of a test, and so its name.
        renamed = {_without_parameters(test): self._places[test] for test in missing}
        placed, others = [], []
        for item in items:
            place = self._places.get(item.nodeid, renamed.get(_without_parameters(item.nodeid)))
            if place is None:
                others.append(item)
            else:
                placed.append((place, item))
        items[:] = [item for _, item in sorted(placed, key=lambda pair: pair[0])]
        config.hook.pytest_deselected(items=others)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report a test that begins."""
        tell(self._fd, "start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report that a test failed, and why."""
        if report.failed:
            tell(self._fd, "failed", report.nodeid, _reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that cannot be imported."""
        if report.failed:
            tell(self._fd, "failed", report.nodeid, _reason(report))


def tell(fd: int, *words: str) -> None:
    """Write one report to the worker."""
    os.write(fd, json.dumps(words).encode() + b"\n")


def _without_parameters(test: str) -> str:
    return test.partition("[")[0]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longreprtext.strip().splitlines()
    errors = [line for line in text if line.startswith("E ")]
    return (errors or text or [""])[0].removeprefix("E").strip()[:200]


def run(job: Job, fd: int) -> NoReturn:
    """Run pytest in this process, which was forked for it, and end it with pytest's status."""
    _prepare(job)
    plugins: list[Any] = [SelectedTests(job.get("tests", ()), fd)]
    arguments = [
        *_ARGUMENTS,
        f"--basetemp={job['scratch']}/pytest",
        f"--rootdir={job['root']}",
        *job["files"],
    ]
    recorder = None
    if "packages" in job:
        lines, programs = Path(job["scratch"], "lines"), Path(job["scratch"], "compiled")
        for folder in (lines, programs):
            folder.mkdir(mode=0o700)
        os.environ[COMPILATION_CACHE] = str(programs)
        recorder = Recorder(job["root"], job["packages"], lines, programs)
        plugins.append(recorder)
    else:
        arguments.append("-x")
    status = int(pytest.main(arguments, plugins=plugins))
    if recorder is not None:
        Path(job["scratch"], "recorded.json").write_text(json.dumps(recorder.result()))
    sys.stdout.flush()
    tell(fd, "end", str(status))
    os._exit(status)  # threads that a mutant left running do not matter


def _prepare(job: Job) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    scratch = Path(job["scratch"])
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    root = job["root"]
    os.chdir(root)
    sys.path.insert(0, root)
    paths = [root]
    if "packages" in job:
        lab = str(Path(__file__).parents[2])
        paths = [str(Path(__file__).with_name("site")), root, lab]
        os.environ[LINES_ROOT] = root
        os.environ[LINES_PACKAGES] = os.pathsep.join(job["packages"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
