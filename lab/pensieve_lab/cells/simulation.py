"""An engine in virtual time: real requests, scheduler and launches, with cell times from a table.

Owns: workers that only take time, and when requests arrive.
Does not know: JAX, or what cells compute.
Called by `cells.loads` and `cells.timeline`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pensieve_jax.cellular.admission import Unfold
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.launches import Done, Launch
from pensieve_jax.cellular.loop import Loop
from pensieve_jax.cellular.request_processor import MakeScheduler, RequestProcessor
from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_jax.core.clock import VirtualClock
from pensieve_lab.cells.times import CellTimes


class VirtualWorker:
    """Device that takes time and computes nothing; its outputs are zeros.

    Attributes:
      begun_s: begin time of each task of its last launch, possibly in the future.
    """

    def __init__(self, times: CellTimes, clock: VirtualClock) -> None:
        """Start with no launches."""
        self._times, self._clock = times, clock
        self._flying: deque[tuple[float, Launch]] = deque()
        self._free_s = 0.0
        self.begun_s: np.ndarray = np.empty(0)

    @property
    def num_in_flight(self) -> int:
        """Number of launches in flight."""
        return len(self._flying)

    @property
    def next_end_s(self) -> float:
        """End time of the oldest launch; infinity without launches."""
        return self._flying[0][0] if self._flying else np.inf

    def prepare(self, launch: Launch) -> bool:
        """Return True: a launch can always begin."""
        return True

    def launch(self, launch: Launch) -> None:
        """Queue a launch behind those in flight."""
        parts = launch.parts
        took_s = [self._times.task_of(launch.kind.name, part.batch_size) for part in parts]
        ends_s = np.cumsum(np.repeat(took_s, [part.num_tasks for part in parts]))
        begin_s = max(self._free_s, self._clock.now()) + self._times.launch_s
        self.begun_s = begin_s + np.append(0.0, ends_s[:-1])
        self._free_s = begin_s + float(ends_s[-1])
        self._flying.append((self._free_s, launch))

    def poll(self) -> Iterator[Done]:
        """Yield the launches that ended by now."""
        while self._flying and self._flying[0][0] <= self._clock.now():
            _, launch = self._flying.popleft()
            emitted = [
                [np.zeros((part.num_tasks, part.batch_size), np.int32) for part in launch.parts]
                for _ in launch.kind.emits
            ]
            yield Done(launch, emitted, [{} for _ in launch.reads])


@dataclass(frozen=True)
class SimulationResult:
    """Times of a run, with one entry per request in order of arrival.

    Attributes:
      arrival_s, begin_s, end_s: arrival, begin of the first cell, and result. In real time the begin of a
        cell is not observable; `begin_s` is then the time at which its launch was given to a device.
    """

    arrival_s: np.ndarray
    begin_s: np.ndarray
    end_s: np.ndarray


def simulate(
    types: CellTypes,
    unfold: Unfold,
    config: CellularConfig,
    times: CellTimes,
    requests: Sequence[Any],
    arrival_s: np.ndarray,
    make_scheduler: MakeScheduler = CellScheduler,
    observe: Callable[[float, list[np.ndarray]], None] | None = None,
) -> SimulationResult:
    """Serve requests that arrive at these rising times, to the end of the last.

    Every emitted value is 0, so a chain `until` another value runs to its full length. `observe` is called
    with the begin time of each launch and, for each of its tasks, the positions of the requests in it.
    """
    clock = VirtualClock()
    workers = [VirtualWorker(times, clock) for _ in range(config.num_devices)]
    processor = RequestProcessor(types, config, make_scheduler)
    most = config.launches_in_flight or 1
    begin_s, end_s = np.full(len(requests), np.inf), np.full(len(requests), np.nan)

    def begun(launch: Launch) -> None:
        """Record the begin of requests; a request's serial is its position in order of arrival."""
        begun_s = workers[launch.worker].begun_s
        tasks = [processor.requests.serial[processor.nodes.request[task]] for task in launch.tasks]
        for serials, one_s in zip(tasks, begun_s, strict=True):
            np.minimum.at(begin_s, serials, one_s)
        if observe is not None:
            observe(float(begun_s[0]), tasks)

    loop = Loop(processor, workers, most, observe=begun)
    num_sent = num_ended = 0
    while num_ended < len(requests):
        next_arrival_s = arrival_s[num_sent] if num_sent < len(requests) else np.inf
        has_room = any(worker.num_in_flight < most for worker in workers)
        next_end_s = min(worker.next_end_s for worker in workers)
        clock.advance_to(min(next_end_s, next_arrival_s) if has_room else next_end_s)
        num_due = int(np.searchsorted(arrival_s, clock.now(), "right"))
        if num_due > num_sent:
            processor.submit_many(requests[num_sent:num_due], unfold)
            num_sent = num_due
        for handle in loop.step():
            end_s[handle.serial] = clock.now()
            num_ended += 1
    return SimulationResult(arrival_s, begin_s, end_s)
