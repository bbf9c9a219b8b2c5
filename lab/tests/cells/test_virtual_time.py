"""Cells in virtual time: their times, the worker that takes them, and rows that there are."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pensieve_jax.cellular import CellularConfig
from pensieve_jax.cellular.cells import Cell, CellError, CellTypes
from pensieve_jax.cellular.launches import make_parts
from pensieve_jax.core.clock import VirtualClock
from pensieve_lab.cells.simulation import VirtualWorker, simulate
from pensieve_lab.cells.times import CellTimes, thesis_v100
from tests.cellular.hash_cells import make_cells
from tests.cellular.test_rows import WIDE, unfold

TYPES = CellTypes(make_cells(dict.fromkeys(("step", "decode", "leaf", "inner", "join", "narrow"), 4)))


def test_times_lie_on_lines():
    times = CellTimes({"a": {2: 1.0, 4: 3.0}}, overhead_s={2: 10.0, 4: 20.0})
    assert [times.task_of("a", size) for size in (1, 2, 3, 4, 8)] == [11.0, 11.0, 17.0, 23.0, 46.0]
    assert CellTimes({"a": {2: 1.0}}).task_of("a", 2) == 1.0
    with pytest.raises(CellError, match="one that was measured: a"):
        times.task_of("b", 1)


def test_the_times_of_the_thesis():
    """Section 2.7.3: a step of 185 microseconds at 64 is 250 with overhead; a decoder's is three times it."""
    times = thesis_v100()
    assert times.task_of("lstm", 64) == pytest.approx(250e-6)
    assert times.task_of("lstm", 512) == pytest.approx(784e-6 + 117e-6)
    assert times.task_of("decoder", 64) == pytest.approx(3 * 185e-6 + 65e-6)
    assert times.task_of("lstm", 1) == times.task_of("lstm", 64)


def test_a_virtual_worker_runs_launches_one_behind_the_other():
    clock = VirtualClock()
    worker = VirtualWorker(CellTimes({"step": {1: 1.0, 4: 3.0}}, launch_s=0.5), clock)
    kind = TYPES.find("step")
    tasks = [np.zeros((3, 1), np.int64)] * 3
    launch: Any = SimpleNamespace(kind=kind, parts=make_parts(kind, tasks, 9), reads=[])
    assert worker.next_end_s == np.inf and worker.num_in_flight == 0
    clock.advance_to(2.0)
    worker.launch(launch)
    assert worker.begun_s.tolist() == [2.5, 3.5, 4.5] and worker.next_end_s == 5.5
    worker.launch(launch)
    assert worker.begun_s.tolist() == [6.0, 7.0, 8.0] and worker.num_in_flight == 2
    assert not list(worker.poll())
    clock.advance_to(5.5)
    assert [len(done.emitted) for done in worker.poll()] == [1] and worker.next_end_s == 9.0


def test_there_are_as_many_rows_as_in_an_engine():
    """Of 300 requests of one row of 4 MiB 44 have to wait."""
    types = CellTypes([Cell(WIDE, "wide", 512)])
    times = CellTimes({"wide": {512: 1.0}})
    served = simulate(types, unfold, CellularConfig(), times, [1] * 300, np.zeros(300))
    assert np.bincount(served.end_s.astype(int)).tolist() == [0, 256, 44]


def test_it_needs_no_jax():
    code = (
        "import sys\nsys.modules['jax'] = sys.modules['flax'] = None\nimport pensieve_lab.cells.simulation\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
