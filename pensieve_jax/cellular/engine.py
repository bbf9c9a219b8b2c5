"""The engine of cells: what a user makes, submits to, and steps.

Owns: devices and compiled programs of an engine, and its public methods.
Does not know: how cells are chosen, or what they compute.
Called by: users, and the launchers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from pensieve_jax.cellular.admission import Unfold, UnfoldMany
from pensieve_jax.cellular.cells import Cell, CellTypes
from pensieve_jax.cellular.config import TASKS_PER_PROGRAM, CellularConfig
from pensieve_jax.cellular.device.programs import CellProgram, cell_program
from pensieve_jax.cellular.device.worker import DeviceWorker
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.loop import Loop
from pensieve_jax.cellular.request import CellOutput, CellRequest
from pensieve_jax.cellular.request_processor import MakeScheduler, RequestProcessor
from pensieve_jax.cellular.rows import num_rows_for
from pensieve_jax.cellular.scheduler import Scheduler
from pensieve_jax.core.errors import ConfigError, EngineClosedError
from pensieve_jax.runtime.compilation import (
    CompilationCounter,
    CompilationJob,
    compile_all,
    keep_compilations_in,
)
from pensieve_jax.runtime.program import Program

if TYPE_CHECKING:
    from model_defs.recurrent import Cell as ModelCell

_SLICE = 512  # requests that `run` unfolds before it looks at the devices again


class CellularEngine:
    """Requests of recurrent models, whose cells are batched one by one: they join and leave between cells.

    Not for several threads at a time.

    Attributes:
      types, processor, workers: what runs, for checks of it; not to be changed.
    """

    def __init__(
        self,
        cells: Iterable[Cell | ModelCell],
        unfold: Unfold,
        config: CellularConfig | None = None,
        *,
        unfold_many: UnfoldMany | None = None,
        make_scheduler: MakeScheduler = Scheduler,
        observe: Callable[[Launch], None] | None = None,
        compilation_cache_dir: str | None = None,
        progress: bool = True,
    ) -> None:
        """Compile everything that may run; nothing is compiled afterwards.

        Args:
          cells: of all requests.
          unfold: called as `unfold(request, graph)`, adds the request's nodes to a `Graph`.
          config: the limits.
          unfold_many: called as `unfold_many(requests, graph)` in its place by `submit_many`. Where requests
            are sentences, `Graph.sentences` adds them all at once, which costs each a tenth.
          make_scheduler: what chooses cells: `Scheduler`, or a rival of it from `baselines`.
          observe: called with every launch that was begun; `requests_of` says whose cells are in it.
          compilation_cache_dir: where JAX keeps what it compiled, for the next start.
          progress: show a bar.

        Raises:
          CellError: a cell cannot be batched.
          ConfigError: there are fewer devices.
        """
        self._config = config = config or CellularConfig()
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
        programs = [cell_program(self.types, kind) for kind in self.types.types]
        self.workers: list[DeviceWorker] = []
        for device in devices[: config.num_devices]:
            executables = self._compiled(programs, device, progress)
            DeviceWorker(self.types, programs, executables, self._num_rows, device, self.workers)
        self._launches_in_flight = config.launches_in_flight or (1 if devices[0].platform == "cpu" else 2)
        self._observe = observe
        self.begin_again(make_scheduler)
        self._is_closed = False
        for worker in self.workers:
            worker.warm_up()
        self._counter = CompilationCounter()

    def submit(self, request: Any) -> CellRequest:
        """Join the running cells; returns at once.

        Raises:
          GraphError, CapacityError, CellError: the request cannot be served; nothing else is harmed.
          EngineClosedError: the engine was closed.
        """
        return self.submit_many([request])[0]

    def submit_many(self, requests: Iterable[Any]) -> list[CellRequest]:
        """Many at once, which costs less each; all of them or, with an error, none. See `submit`."""
        self._check_open()
        return self.processor.submit_many(list(requests), self._unfold, self._unfold_many)

    def step(self) -> list[CellRequest]:
        """See what has ended and launch what is ready, without waiting; returns requests now done."""
        self._check_open()
        return self._loop.step()

    def wait(self) -> None:
        """Until a launch has ended, which the next `step` sees; at once if one has, or none is in flight.

        JAX waits for one array, not for whichever comes first. So where several devices are busy, it is
        waited for that whose oldest launch began before the others': another may be idle for as long. Who
        cannot have that goes on calling `step`.
        """
        busy = [worker for worker in self.workers if worker.num_in_flight]
        if busy and not any(worker.has_ended for worker in busy):
            min(busy, key=lambda worker: worker.begun_s).wait()

    def cancel(self, request: CellRequest) -> bool:
        """Compute no more of it; False if it is done, or was submitted to another engine."""
        return self.processor.cancel(request)

    def run(self, requests: Iterable[Any]) -> list[CellOutput]:
        """Serve these, and whatever else was submitted, to the end; outputs in order.

        Raises:
          GraphError, CapacityError, CellError: one cannot be served; those before it run, and are lost.
          LaunchFailedError: what one was in has failed.
        """
        handles: list[CellRequest] = []
        todo = list(requests)
        most = _SLICE if self._config.max_num_waiting is None else self._config.max_num_waiting
        num_done = 0  # of the first ones, one behind the other
        while num_done < len(todo):
            room = min(_SLICE, most - len(self.processor.admission.waiting))
            has_more = len(handles) < len(todo) and room > 0
            if has_more:
                handles += self.submit_many(todo[len(handles) : len(handles) + room])
            if not self.step() and not has_more:
                self.wait()
            while num_done < len(handles) and handles[num_done].done:
                num_done += 1
        return [handle.result() for handle in handles]

    def requests_of(self, launch: Launch) -> list[np.ndarray]:
        """For each task of an observed launch, the numbers (`CellRequest.serial`) of its cells' requests."""
        nodes, serial = self.processor.nodes, self.processor.requests.serial
        return [serial[nodes.request[task]] for task in launch.tasks]

    def begin_again(self, make_scheduler: MakeScheduler) -> None:
        """Forget all requests, and go on with another scheduler and the same programs: to compare them.

        Raises:
          ConfigError: a launch is in flight.
        """
        num_in_flight = sum(worker.num_in_flight for worker in self.workers)
        if num_in_flight:
            raise ConfigError("launches in flight", num_in_flight, "none, before another scheduler begins")
        self.processor = RequestProcessor(self.types, self._config, make_scheduler)
        self._loop = Loop(self.processor, self.workers, self._launches_in_flight, observe=self._observe)

    def stats(self) -> dict[str, int]:
        """Counts since the start."""
        return {
            "num_compilations": self._counter.value,
            "num_submitted": self.processor.requests.num_ever,
            "num_waiting": len(self.processor.admission.waiting),
            "num_running": len(self.processor.handles) - len(self.processor.admission.waiting),
            "num_rows_promised": int(self.processor.admission.budget.promised.max()),
            "num_moved_rows": self.processor.formation.num_moved,
        }

    def close(self) -> None:
        """Give the devices' memory back; requests that are not done never will be."""
        self._is_closed = True
        self.workers.clear()

    def __enter__(self) -> Self:
        """The engine; `close` at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed")

    def _compiled(
        self, programs: Sequence[CellProgram], device: jax.Device, progress: bool
    ) -> dict[tuple[int, int, int], jax.stages.Compiled]:
        """Every type, number of tasks and batch size, for one device."""
        found: dict[tuple[int, int, int], jax.stages.Compiled] = {}
        sharding = SingleDeviceSharding(device)
        num_rows = self._num_rows

        def on_device(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def pool(kind: int) -> tuple[jax.ShapeDtypeStruct, ...]:
            fields = self.types.kinds[kind]
            return tuple(on_device((num_rows + 1, *one.shape), one.dtype) for _, one in fields)

        jobs = []
        for kind, program in zip(self.types.types, programs, strict=True):
            num_words = 1 + len(kind.input_kinds) + len(kind.immediates)
            others = tuple(pool(one) for one in program.other_kinds)
            run = program.on(device)
            weights = tuple(on_device(one.shape, one.dtype) for one in program.weights)
            for num in (one for one in TASKS_PER_PROGRAM if one <= self._config.max_num_tasks):
                for size in kind.batch_sizes:
                    words = on_device((num, num_words, size), np.int32)
                    keep = functools.partial(found.__setitem__, (kind.index, num, size))
                    lowered = Program(run, (pool(kind.state_kind), others, weights, words), {})
                    jobs.append(CompilationJob(f"{kind.name} {num} x {size}", lowered, keep))
        with tqdm(total=len(jobs), desc="compiling", disable=not progress, leave=False) as bar:
            for name in compile_all(jobs):
                bar.set_postfix_str(name, refresh=False)
                bar.update()
        return found
