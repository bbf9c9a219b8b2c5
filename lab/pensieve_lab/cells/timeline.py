"""Figure 2.5 of the thesis: eight requests in virtual time, with cellular and with graph batching.

Owns: the requests, and what is recorded of a run.
Does not know: how it is shown.
Called by `experiments.cell_figures`.

The thesis gives the lengths of requests 1 to 4, that request 5 has arrived by time 2 and requests 6 and 7 by
time 3, and that the second batch of graphs takes 7. The other numbers are chosen to fit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_lab.cells import shapes
from pensieve_lab.cells.baselines import Padding
from pensieve_lab.cells.simulation import simulate
from pensieve_lab.cells.times import CellTimes

LENGTHS = (2, 3, 3, 5, 7, 3, 4, 1)
ARRIVALS_S = (0.0, 0.0, 0.0, 0.0, 1.5, 2.5, 2.5, 3.5)
MAX_BATCH = 4
SYSTEMS: dict[str, Any] = {
    "cellular batching": CellScheduler,
    "graph batching": functools.partial(Padding, width=100, oldest_first=True),
}


@dataclass
class Timeline:
    """Record of a run. A cell takes one unit of time, and requests are numbered from 1.

    Attributes:
      tasks: begin of each task, and the requests in it.
      begin_s, end_s: of each request.
    """

    tasks: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    begin_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    end_s: np.ndarray = field(default_factory=lambda: np.empty(0))

    def ending(self, time_s: float) -> list[int]:
        """Return the requests that end at this time."""
        return (1 + np.flatnonzero(self.end_s == time_s)).tolist()


def run(make_scheduler: Any) -> Timeline:
    """Serve the requests with one task per launch."""
    shape = shapes.lstm(MAX_BATCH)
    timeline = Timeline()

    def observe(begin_s: float, tasks: list[np.ndarray]) -> None:
        for place, serials in enumerate(tasks):
            timeline.tasks.append((begin_s + place, tuple(sorted((1 + serials).tolist()))))

    served = simulate(
        shape.types,
        shape.unfold,
        CellularConfig(max_num_tasks=1),
        CellTimes({"lstm": {MAX_BATCH: 1.0}}),
        LENGTHS,
        np.array(ARRIVALS_S),
        make_scheduler,
        observe=observe,
    )
    timeline.begin_s, timeline.end_s = served.begin_s, served.end_s
    return timeline
