"""Programs are compiled in parallel, and none is lost."""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from pensieve_jax.runtime.compilation import CompilationCounter, CompilationJob, compile_all
from pensieve_jax.runtime.program import Program
from tests.deadlines import TIMEOUT_S


@jax.jit
def scaled(x, n):
    return x * n + 1


class BlockedProgram:
    """A program whose compilation blocks on `meet`."""

    def __init__(self, number, meet):
        self.number, self.meet = number, meet

    def lower(self):
        return self

    def compile(self):
        self.meet()
        return self.number


def test_programs_are_compiled_in_parallel(monkeypatch):
    """Pairs of programs that wait for each other all finish."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    barrier, compiled = threading.Barrier(2, timeout=TIMEOUT_S), []
    programs = (BlockedProgram(number, barrier.wait) for number in range(4))
    names = list(compile_all(CompilationJob(str(one.number), one, compiled.append) for one in programs))
    assert sorted(names) == ["0", "1", "2", "3"] and sorted(compiled) == [0, 1, 2, 3]


def test_a_failure_is_raised():
    compiled = []

    def fail():
        raise ValueError("no memory")

    programs = BlockedProgram(0, lambda: None), BlockedProgram(1, fail)
    with pytest.raises(ValueError, match="no memory"):
        list(compile_all(CompilationJob("", one, compiled.append) for one in programs))
    assert compiled in ([], [0])


def test_programs_that_have_not_begun_are_dropped_on_cancellation(monkeypatch):
    """Ctrl-C may come while progress is shown: the program that is being compiled is waited for."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    all_there, begun, dropped = threading.Event(), threading.Event(), threading.Event()
    compiled = []

    def hold():
        begun.set()
        assert dropped.wait(timeout=TIMEOUT_S)

    def jobs():
        meets = (lambda: all_there.wait(timeout=TIMEOUT_S)), hold, (lambda: None), (lambda: None)
        for number, meet in enumerate(meets):
            yield CompilationJob(str(number), BlockedProgram(number, meet), compiled.append)
        all_there.set()

    submit = ThreadPoolExecutor.submit

    def noted_submit(pool, fn):
        future = submit(pool, fn)
        future.add_done_callback(lambda future: dropped.set() if future.cancelled() else None)
        return future

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted_submit)
    names = compile_all(jobs())
    assert next(names) == "0" and begun.wait(timeout=TIMEOUT_S)
    names.close()
    assert dropped.is_set() and compiled == [0]


def test_real_programs_are_counted_and_run():
    counter, compiled = CompilationCounter(), {}
    programs = {n: Program(scaled, (jnp.ones(n), n), {}) for n in (2, 3, 5)}
    before = counter.value
    jobs = (
        CompilationJob(str(n), one, functools.partial(compiled.__setitem__, n)) for n, one in programs.items()
    )
    assert sorted(compile_all(jobs)) == ["2", "3", "5"] and counter.value - before == 3
    for n, program in compiled.items():
        assert program(jnp.ones(n), n).tolist() == [n + 1] * n
