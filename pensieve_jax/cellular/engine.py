"""Cellular engine, which a user creates, submits requests to, and steps.

Owns: the devices and compiled programs of an engine, and its public methods.
Does not know: how cells are chosen, or what they compute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from tqdm import tqdm

from pensieve_jax.cellular.admission import Unfold, UnfoldMany
from pensieve_jax.cellular.cells import Cell, CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.device.device_programs import DevicePrograms
from pensieve_jax.cellular.device.programs import cell_program
from pensieve_jax.cellular.device.worker import DeviceWorker
from pensieve_jax.cellular.errors import LaunchFailedError
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.loop import Loop
from pensieve_jax.cellular.request import CellOutput, CellRequest
from pensieve_jax.cellular.request_processor import MakeScheduler, RequestProcessor
from pensieve_jax.cellular.rows import num_rows_for
from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_jax.core.change_guard import ChangeGuard
from pensieve_jax.core.errors import ConfigError, EngineClosedError, InvalidFieldError
from pensieve_jax.core.outputs import all_results
from pensieve_jax.runtime.compilation import CompilationCounter, compile_all, keep_compilations_in

if TYPE_CHECKING:
    from model_defs.recurrent import RecurrentCell

_SLICE = 512  # requests that `run` unfolds between two steps
_PLACE = re.compile(r"requests\[(\d+)\]")


class CellularEngine:
    """Engine that batches single cells of recurrent models; requests join and leave between cells.

    Use it from one thread at a time.

    Attributes:
      types, processor, workers: parts of the engine, for inspection only.
    """

    def __init__(
        self,
        cells: Iterable[Cell | RecurrentCell],
        unfold: Unfold,
        config: CellularConfig | None = None,
        *,
        unfold_many: UnfoldMany | None = None,
        make_scheduler: MakeScheduler = CellScheduler,
        observe: Callable[[Launch], None] | None = None,
        compilation_cache_dir: str | None = None,
        progress: bool | None = None,
    ) -> None:
        """Trace all cells, and compile the first program of each, or all if `compile_at_start` is set.

        Args:
          cells: the cells of all requests.
          unfold: called as `unfold(request, graph)`; it adds the request's nodes to a `Graph`.
          config: the limits.
          unfold_many: called as `unfold_many(requests, graph)` instead of `unfold` by `submit_many`. If
            requests are sentences, `Graph.sentences` adds all of them at once, at a tenth of the cost.
          make_scheduler: factory of the scheduler: `CellScheduler`, or a baseline of the lab.
          observe: called with every begun launch; `requests_of` names the requests in it.
          compilation_cache_dir: directory where JAX stores compiled programs for the next start.
          progress: show a bar while compiling; None means on a terminal.

        Raises:
          CellError: a cell cannot be batched.
          ConfigError: a value is invalid, or JAX has fewer devices than `num_devices`.
        """
        self._config = config = config or CellularConfig()
        if not isinstance(config, CellularConfig):
            raise ConfigError("config", config, "a CellularConfig")
        if not callable(unfold):
            raise ConfigError("unfold", unfold, "a function of a request and a Graph")
        self._unfold, self._unfold_many = unfold, unfold_many
        self.types = CellTypes(cells)
        devices = jax.local_devices()
        if config.num_devices > len(devices):
            raise ConfigError(
                "num_devices", config.num_devices, f"at most {len(devices)}, the devices that JAX has"
            )
        if compilation_cache_dir is not None:
            keep_compilations_in(compilation_cache_dir)
        self._num_rows = num_rows_for(config.num_rows, self.types.row_bytes)
        traced = [cell_program(self.types, kind, self._num_rows) for kind in self.types.types]
        devices = devices[: config.num_devices]
        programs = [
            DevicePrograms(self.types, traced, self._num_rows, config.max_num_tasks, device)
            for device in devices
        ]
        self._compile_start(programs, sys.stderr.isatty() if progress is None else progress)
        self.workers: list[DeviceWorker] = []
        for device, own in zip(devices, programs, strict=True):
            DeviceWorker(self.types, traced, own, self._num_rows, device, self.workers)
        self._launches_in_flight = config.launches_in_flight or (1 if devices[0].platform == "cpu" else 2)
        self._observe = observe
        self._launched: list[Launch] = []
        self._is_closed = False
        self._guard = ChangeGuard(self._recover)
        self._begin(make_scheduler)
        for worker in self.workers:
            worker.warm_up()
        self._counter = CompilationCounter()

    def submit(self, request: Any) -> CellRequest:
        """Submit a request and return at once; its cells join the running ones.

        Raises:
          GraphError, CapacityError, CellError: the request cannot be served; other requests are unaffected.
          EngineClosedError: the engine was closed.
        """
        return self.submit_many([request])[0]

    def submit_many(self, requests: Iterable[Any]) -> list[CellRequest]:
        """Submit several requests at less cost per request. On an error, none is submitted; see `submit`."""
        handles: list[CellRequest] = []
        self._submit_many(list(requests), handles, is_limited=True)
        return handles

    def step(self) -> list[CellRequest]:
        """Process finished launches and begin new ones, without waiting; return the finished requests."""
        self._check_usable()
        ended = self._guard.run(self._loop.step)
        if self._observe is not None:
            launched = self._launched.copy()
            self._launched.clear()
            for launch in launched:
                self._observe(launch)
        return ended

    def wait(self) -> None:
        """Wait until a launch has finished, for the next `step`; return at once if none is in flight.

        If a launch waits for its programs and no other is in flight, wait for one of these.

        JAX waits for one given array, not for the first of several. So this waits for the device whose oldest
        launch started first, and another device may be idle meanwhile. A caller that cannot accept this calls
        `step` repeatedly instead.
        """
        self._check_usable()
        busy = [worker for worker in self.workers if worker.num_in_flight]
        if busy and not any(worker.has_ended for worker in busy):
            min(busy, key=lambda worker: worker.begun_s).wait()
        elif not busy and self._loop.held is not None:
            self.workers[self._loop.held.worker].programs.wait()

    def cancel(self, request: CellRequest) -> bool:
        """Cancel a request; return False if it is done, or was submitted to another engine."""
        self._check_usable()
        return self._guard.run(lambda: self.processor.cancel(request))

    def run(self, requests: Iterable[Any]) -> list[CellOutput]:
        """Serve requests until all are done; return their outputs in order.

        Requests that were submitted earlier run meanwhile. At most some hundreds of requests wait for rows at
        a time, whatever `max_num_waiting` is. An exception cancels the unfinished requests.

        Raises:
          GraphError, CapacityError, CellError: a request cannot be served; the earlier ones are cancelled.
          LaunchFailedError: a launch of one request failed; its `outputs` hold the others'.
          EngineClosedError: the engine was closed.
        """
        self._check_usable()
        handles: list[CellRequest] = []
        try:
            self._run(list(requests), handles)
        finally:
            for handle in handles:
                if not handle.done:
                    self.cancel(handle)
        return all_results(handles)

    def requests_of(self, launch: Launch) -> list[np.ndarray]:
        """Return the `CellRequest.serial` of every cell's request, for each task of an observed launch."""
        nodes, serial = self.processor.nodes, self.processor.requests.serial
        return [serial[nodes.request[task]] for task in launch.tasks]

    def restart_with(self, make_scheduler: MakeScheduler) -> None:
        """Discard all requests and continue with another scheduler, to compare schedulers on equal programs.

        Raises:
          ConfigError: a launch is in flight.
        """
        num_in_flight = sum(worker.num_in_flight for worker in self.workers)
        num_in_flight += self._loop.held is not None
        if num_in_flight and not self._guard.interrupted:
            raise ConfigError("launches in flight", num_in_flight, "0 before the scheduler is replaced")
        self._begin(make_scheduler)

    def _begin(self, make_scheduler: MakeScheduler) -> None:
        self._make_scheduler = make_scheduler
        self.processor = RequestProcessor(self.types, self._config, make_scheduler)
        observe = None if self._observe is None else self._launched.append
        self._loop = Loop(self.processor, self.workers, self._launches_in_flight, observe=observe)

    def stats(self) -> dict[str, int]:
        """Return counters of requests since the start, and of requests in the engine now.

        `num_programs` counts the compiled programs of all devices. `num_compilations` counts all compilations
        in this process since the start, by any code.
        """
        return {
            "num_programs": sum(len(worker.programs.compiled) for worker in self.workers),
            "num_compilations": self._counter.value,
            "num_submitted": self.processor.requests.num_ever,
            "num_answered": self.processor.num_answered,
            "num_failed": self.processor.num_failed,
            "num_cancelled": self.processor.num_cancelled,
            "num_waiting": len(self.processor.admission.waiting),
            "num_running": len(self.processor.handles) - len(self.processor.admission.waiting),
            "num_rows_promised": int(self.processor.admission.budget.promised.max()),
            "num_moved_rows": self.processor.formation.num_moved,
        }

    def close(self) -> None:
        """Free the device memory, and fail unfinished requests with EngineClosedError.

        A program that is being compiled is waited for.
        """
        self._is_closed = True
        for handle in self.processor.handles.values():
            handle.fail(EngineClosedError("The engine was closed."))
        for worker in self.workers:
            worker.programs.close()
        self.workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, todo: list[Any], handles: list[CellRequest]) -> None:
        """Submit and serve all of `todo`; `handles` receives the submitted requests."""
        num_done = 0  # length of the finished prefix of `handles`
        while num_done < len(todo):
            first = len(handles)
            has_more = first < len(todo) and len(self.processor.admission.waiting) < _SLICE
            if has_more:
                some = todo[first : first + _SLICE]
                try:
                    self._submit_many(some, handles, is_limited=False)
                except InvalidFieldError as error:
                    raise _renumbered(error, first, len(some), len(todo)) from error
            if not self.step() and not has_more:
                self.wait()
            while num_done < len(handles) and handles[num_done].done:
                num_done += 1

    def _submit_many(self, requests: list[Any], handles: list[CellRequest], *, is_limited: bool) -> None:
        """Submit, and add the handles within the guarded change, so that an interrupt loses no handle."""
        self._check_usable()
        if not requests:
            return
        processor = self.processor
        unfolded = processor.read(requests, self._unfold, self._unfold_many, is_limited=is_limited)
        self._guard.run(lambda: handles.extend(processor.enter(unfolded)))

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineClosedError("The engine was closed.")
        self._guard.check()

    def _recover(self) -> None:
        """Fail all requests after an interrupt in mid-change, since the state may be inconsistent."""
        error = LaunchFailedError("An interrupt came in the middle of a step; unfinished requests are lost.")
        for handle in self.processor.handles.values():
            if not handle.done:
                handle.fail(error)
        for worker in self.workers:
            worker.restart()
        self._launched.clear()
        self._begin(self._make_scheduler)

    def _compile_start(self, programs: Iterable[DevicePrograms], progress: bool) -> None:
        """Compile what the start compiles: all programs, or the first of each type."""
        jobs = [job for one in programs for job in one.jobs(all_programs=self._config.compile_at_start)]
        with tqdm(total=len(jobs), desc="compiling", disable=not progress, leave=False) as bar:
            for name in compile_all(jobs):
                bar.set_postfix_str(name, refresh=False)
                bar.update()


def _renumbered(error: InvalidFieldError, first: int, num: int, num_all: int) -> InvalidFieldError:
    """Return an error of a slice that starts at request `first`, with the request's index among all."""
    if num_all == 1:
        return error
    found = _PLACE.match(error.field)
    name = f"requests[{first + int(found[1])}]{error.field[found.end() :]}" if found else error.field
    if num == 1 and not found:
        name = f"requests[{first}].{error.field}"
    return type(error)(name, error.value, error.limit, error.hint)
