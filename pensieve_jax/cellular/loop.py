"""Event loop of a cellular engine, which processes completions and begins launches.

Owns: the order of completions and launches.
Does not know: whether workers are devices or a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pensieve_jax.cellular.launches import Done, Launch
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.request_processor import RequestProcessor


class Worker(Protocol):
    """Device, or a substitute for one. It runs launches in order."""

    @property
    def num_in_flight(self) -> int:
        """Launches that were begun and not yet reported by `poll`."""

    def prepare(self, launch: Launch) -> bool:
        """Return whether a launch can begin; if not, prepare it without waiting."""

    def launch(self, launch: Launch) -> None:
        """Begin a prepared launch without waiting. `poll` reports errors."""

    def poll(self) -> Iterable[Done]:
        """Return the launches that have finished since the last call, in order."""


class Loop:
    """Event loop of one cellular engine.

    Attributes:
      held: the launch that was formed and whose programs are being compiled, or None. No other launch begins
        before it, on any device, since later ones may overwrite the rows that it reads.
    """

    def __init__(
        self,
        processor: RequestProcessor,
        workers: Sequence[Worker],
        launches_in_flight: int,
        *,
        observe: Callable[[Launch], None] | None = None,
    ) -> None:
        """Start without launches.

        Args:
          processor: supplies launches, and processes their completion.
          workers: run the launches.
          launches_in_flight: most incomplete launches of each worker.
          observe: called with every begun launch.
        """
        self._observe = observe
        self._processor, self._workers = processor, workers
        self._most = launches_in_flight
        self.held: Launch | None = None

    def step(self) -> list[CellRequest]:
        """Process finished launches, then fill every worker; return the finished requests."""
        ended: list[CellRequest] = []
        for worker in self._workers:
            for done in worker.poll():
                ended += self._processor.completed(done)
        if self.held is None or self._begin(self.held):
            self._fill()
        return self._processor.scheduler.reportable(ended)

    def _fill(self) -> None:
        """Begin launches until every worker is full or lacks work, or a launch has to be held."""
        for index, worker in enumerate(self._workers):
            while worker.num_in_flight < self._most:
                launch = self._processor.scheduler.schedule(index)
                if launch is None:
                    break
                self._processor.launched(launch)
                if not self._begin(launch):
                    return

    def _begin(self, launch: Launch) -> bool:
        """Begin a launch, or hold it and return False."""
        worker = self._workers[launch.worker]
        if not worker.prepare(launch):
            self.held = launch
            return False
        self.held = None
        worker.launch(launch)
        if self._observe is not None:
            self._observe(launch)
        return True
