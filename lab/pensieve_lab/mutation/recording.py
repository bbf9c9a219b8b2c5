"""Which lines of the product each test executes, recorded inside pytest.

Owns: the recorder, a pytest plugin: the lines, durations and failures of the tests of one file.
Does not know: how lines are reported (`line_monitor`), or what they are used for (`coverage_map`).
Called by `mutation.pytest_process`.

Lines executed by a fixture of a wider scope count for every test that uses it. Durations are processor times,
since the machine may have been loaded when they were recorded.

The compilation cache of the tests and JAX's own caches are emptied before each test. A test that finds its
program compiled does not trace it, so it executes no line of the model or its kernels.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve_lab.mutation.line_monitor import LINES_FILE, Line, LineMonitor, read_lines


def _cpu_s() -> float:
    """Return the processor time of this process and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Recorder:
    """Pytest plugin that records each test of one file."""

    def __init__(self, root: str, packages: list[str], folder: Path, programs: Path) -> None:
        """Start the monitor of this process.

        Args:
          root: the checkout.
          packages: packages of the checkout whose lines are recorded.
          folder: where processes that tests start write their lines.
          programs: the compilation cache of the tests.
        """
        self._folder = folder
        self._programs = programs
        self._sinks: dict[str, set[Line]] = {}
        self._open = [self._sinks.setdefault("", set())]
        self._wide_fixtures: dict[str, set[str]] = {}
        self._current = ""
        self._seconds: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._monitor = LineMonitor(root, packages, lambda line: self._open[-1].add(line))
        self._monitor.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record one test with its fixtures."""
        self._forget_programs()
        self._current = item.nodeid
        self._wide_fixtures[item.nodeid] = set(getattr(item, "fixturenames", ()))
        start_s = _cpu_s()
        with self._recorded(item.nodeid):
            result = yield
        self._seconds[item.nodeid] = _cpu_s() - start_s
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Record a fixture that tests share separately from any test."""
        if fixturedef.scope == "function":
            return (yield)
        self._wide_fixtures[self._current].add(fixturedef.argname)
        with self._recorded(f"fixture {fixturedef.argname}"):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note unusable tests, which fail or are skipped."""
        if report.outcome != "passed":
            self._failures.setdefault(report.nodeid, f"{report.outcome} in {report.when}")

    def result(self) -> dict[str, Any]:
        """Return the records: a table of lines, and for each test a bit mask over it."""
        names = list(self._sinks)
        for path in self._folder.iterdir():
            self._sinks[names[int(path.name.partition(".")[0])]] |= read_lines(path)
        table: dict[Line, int] = {}
        tests = {}
        for test, seconds in self._seconds.items():
            lines = set(self._sinks[test])
            for name in self._wide_fixtures[test]:
                lines |= self._sinks.get(f"fixture {name}", set())
            mask = 0
            for line in lines:
                mask |= 1 << table.setdefault(line, len(table))
            if test not in self._failures:
                tests[test] = {"seconds": round(seconds, 4), "lines": hex(mask)}
        return {"lines": list(table), "tests": tests, "failures": self._failures}

    @contextlib.contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        number = list(self._sinks).index(name) if name in self._sinks else len(self._sinks)
        before = os.environ.get(LINES_FILE, "")
        self._open.append(self._sinks.setdefault(name, set()))
        os.environ[LINES_FILE] = str(self._folder / str(number))
        self._monitor.report_again()
        try:
            yield
        finally:
            self._open.pop()
            os.environ[LINES_FILE] = before

    def _forget_programs(self) -> None:
        """Delete compiled programs, so that the next test traces; keep folders, which an engine may use."""
        for path in self._programs.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
