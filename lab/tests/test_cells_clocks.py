"""A baseline's planning time on the host is reported separately; cellular batching plans nothing ahead."""

from __future__ import annotations

import functools

from pensieve_jax.cellular import CellularConfig
from pensieve_jax.cellular.cells import Cell, CellTypes
from pensieve_jax.cellular.request_processor import RequestProcessor
from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_lab.cells.baselines import GraphMerging
from tests.cellular.step_cell import STEP, chain
from tests.launching import load


def test_planning_has_a_clock():
    planning = load("pensieve_lab.cells.clocks").PlanningClock()
    types = CellTypes([Cell(STEP, "step", 4)])

    def serve(make_scheduler):
        processor = RequestProcessor(types, CellularConfig(num_rows=8), planning.around(make_scheduler))
        processor.submit_many([3], chain)
        assert processor.scheduler.schedule(0) is not None
        return planning.total_s

    assert serve(functools.partial(GraphMerging, max_graphs=2)) > 0
    planning.begin()
    assert planning.total_s == 0
    assert serve(CellScheduler) is None
