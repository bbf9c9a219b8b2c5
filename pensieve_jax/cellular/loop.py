"""The loop of an engine: completions in, launches out.

Owns: the order of these.
Does not know: whether workers are devices or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pensieve_jax.cellular.launches import Done, Launch
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.request_processor import RequestProcessor


class Worker(Protocol):
    """A device, or what stands for one. It runs launches in order."""

    @property
    def num_in_flight(self) -> int:
        """Launches that were begun and not told of by `poll`."""

    def launch(self, launch: Launch) -> None:
        """Begin one, without waiting; what goes wrong is told by `poll`."""

    def poll(self) -> Iterable[Done]:
        """Launches that have ended since the last call, in order."""


class Loop:
    """Gives the workers of one engine their launches and passes on what they complete."""

    def __init__(
        self,
        processor: RequestProcessor,
        workers: Sequence[Worker],
        launches_in_flight: int,
        *,
        observe: Callable[[Launch], None] | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
          processor: what is asked for launches, and told of their ends.
          workers: where they run.
          launches_in_flight: of each worker, at most.
          observe: called with every launch that was begun.
        """
        self._observe = observe
        self._processor, self._workers = processor, workers
        self._most = launches_in_flight

    def step(self) -> list[CellRequest]:
        """Take what has ended, and give every worker what it has room for; returns requests that are done."""
        ended: list[CellRequest] = []
        for worker in self._workers:
            for done in worker.poll():
                ended += self._processor.completed(done)
        for index, worker in enumerate(self._workers):
            while worker.num_in_flight < self._most:
                launch = self._processor.scheduler.schedule(index)
                if launch is None:
                    break
                self._processor.launched(launch)
                worker.launch(launch)
                if self._observe is not None:
                    self._observe(launch)
        return self._processor.scheduler.told(ended)
