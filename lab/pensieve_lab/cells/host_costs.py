"""Host cost of a launch and of a request, measured with a device that takes no time.

Owns: the device that takes no time, and the clocks.
Does not know: JAX or models; dispatch is not included.
Called by `programs.benchmark_cells`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular.admission import Unfold, UnfoldMany
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.launches import Done, Launch
from pensieve_jax.cellular.loop import Loop
from pensieve_jax.cellular.request_processor import RequestProcessor
from pensieve_lab.cells.clocks import Clock

UNITS = {
    "num_running": "requests in the system at a time",
    "num_together": "requests of one submit_many",
    "submit_s": "seconds to unfold and enter one request",
    "form_s": "seconds to form a launch",
    "complete_s": "seconds to process the end of a launch, and of the requests that end with it",
    "host_s": "seconds of all of these for a launch and the requests that came during it",
    "requests_per_s": "largest number of requests a second that the host can serve, without dispatch",
    "cells_per_launch": "mean number of cells in all tasks of a launch",
}


class _NoDevice:
    """Device whose launches end as soon as it is polled."""

    def __init__(self) -> None:
        self._launches: deque[Launch] = deque()
        self.num_launches = self.num_cells = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._launches)

    def prepare(self, launch: Launch) -> bool:
        """Return True: a launch can always begin."""
        return True

    def launch(self, launch: Launch) -> None:
        self._launches.append(launch)
        self.num_launches += 1
        self.num_cells += launch.num_nodes

    def poll(self) -> Iterator[Done]:
        while self._launches:
            launch = self._launches.popleft()
            emitted = [
                [np.zeros((part.num_tasks, part.batch_size), np.int32) for part in launch.parts]
                for _ in launch.kind.emits
            ]
            yield Done(launch, emitted, [{} for _ in launch.reads])


def host_costs(
    types: CellTypes,
    unfold: Unfold,
    unfold_many: UnfoldMany | None,
    config: CellularConfig,
    requests: Sequence[Any],
    *,
    num_running: int,
    num_together: int,
) -> dict[str, float]:
    """Serve all requests as fast as the host can; the result has the keys of `UNITS`."""
    processor, device = RequestProcessor(types, config), _NoDevice()
    submit, form, complete = (
        Clock(one) for one in (processor.submit_many, processor.scheduler.schedule, processor.completed)
    )
    processor.scheduler.schedule = form  # type: ignore[method-assign, assignment]
    processor.completed = complete  # type: ignore[method-assign, assignment]
    loop = Loop(processor, [device], 1)
    num_sent = num_ended = 0
    start_s = time.perf_counter()
    while num_ended < len(requests):
        if num_sent < len(requests) and num_sent - num_ended <= num_running - num_together:
            submit(requests[num_sent : num_sent + num_together], unfold, unfold_many)
            num_sent = min(num_sent + num_together, len(requests))
        num_ended += len(loop.step())
    took_s = time.perf_counter() - start_s
    return {
        "num_running": num_running,
        "num_together": num_together,
        "submit_s": submit.total_s / len(requests),
        "form_s": form.total_s / device.num_launches,
        "complete_s": complete.total_s / device.num_launches,
        "host_s": took_s / device.num_launches,
        "requests_per_s": len(requests) / took_s,
        "cells_per_launch": device.num_cells / device.num_launches,
    }
