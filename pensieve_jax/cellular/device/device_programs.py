"""Compiled programs of one device: some at the start, the others when they are first needed.

Owns: which programs are compiled, and the threads that compile the others while the engine serves.
Does not know: what a program computes, or launches.

Results differ by rounding between batch sizes, so a launch always runs in the size that it was padded to. It
waits until the program of one task of this size is compiled. Programs of several tasks only save host time:
until they are compiled, their tasks run one by one.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.config import TASKS_PER_PROGRAM
from pensieve_jax.cellular.device.programs import CellProgram, pool_shapes, words_shape
from pensieve_jax.cellular.launches import Part
from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program

type Key = tuple[int, int, int]
"""Type of cell, number of tasks and batch size of a program."""

_MAX_NUM_THREADS = 8  # each holds a whole program in several forms
_log = logging.getLogger(__name__)


class DevicePrograms:
    """Programs of one device. Use it from one thread at a time.

    Attributes:
      compiled: compiled programs. More are added by `prepare`.
    """

    def __init__(
        self,
        types: CellTypes,
        programs: Sequence[CellProgram],
        num_rows: int,
        max_num_tasks: int,
        device: jax.Device,
    ) -> None:
        """Compile nothing yet.

        Args:
          types: the cells.
          programs: the program of each type.
          num_rows: rows of each kind of state.
          max_num_tasks: most tasks of a launch.
          device: the device.
        """
        self._types, self._programs, self._num_rows = types, programs, num_rows
        self._sharding = SingleDeviceSharding(device)
        self._functions = [program.on(device) for program in programs]
        nums = [num for num in TASKS_PER_PROGRAM if num <= max_num_tasks]
        self._all: list[Key] = [
            (kind.index, num, size) for kind in types.types for num in nums for size in kind.batch_sizes
        ]
        self.compiled: dict[Key, jax.stages.Compiled] = {}
        self._needed: dict[Key, Future[jax.stages.Compiled]] = {}  # launches wait for these
        self._wanted: dict[Key, Future[jax.stages.Compiled] | None] = {}  # one at a time, in order of request
        self._errors: dict[Key, Exception] = {}
        # A needed program does not wait for the wanted one, so there are two threads at least.
        self._threads = ThreadPoolExecutor(
            max(2, min(os.cpu_count() or 1, _MAX_NUM_THREADS)), thread_name_prefix="compile-cells"
        )

    def jobs(self, *, all_programs: bool) -> Iterator[CompilationJob]:
        """Yield the jobs of a start: all programs, or one task of the smallest batch of each type."""
        first = {(kind.index, 1, kind.batch_sizes[0]) for kind in self._types.types}
        for key in self._all:
            if all_programs or key in first:
                keep = functools.partial(self.compiled.__setitem__, key)
                yield CompilationJob(self._name(key), self._program(key), keep)

    def prepare(self, kind: CellType, parts: Sequence[Part]) -> bool:
        """Return whether the parts can run, or cannot at all (see `error_of`); compile what they lack.

        After False, call again: `wait` waits for a change.
        """
        if len(self.compiled) == len(self._all):
            return True
        self._collect()
        is_ready = True
        for size in dict.fromkeys(part.batch_size for part in parts):
            key = kind.index, 1, size
            if key in self.compiled or key in self._errors:
                continue
            is_ready = False
            if key not in self._needed:
                self._needed[key] = self._threads.submit(self._compile, key)
        for part in parts:
            key = kind.index, part.num_tasks, part.batch_size
            if part.num_tasks > 1 and key not in self.compiled and key not in self._errors:
                self._wanted.setdefault(key)
        self._begin_wanted()
        return is_ready

    def error_of(self, kind: CellType, parts: Sequence[Part]) -> Exception | None:
        """Return why the parts cannot run, or None. The next launch compiles the program again."""
        found = [self._errors.pop((kind.index, 1, part.batch_size), None) for part in parts]
        return next((error for error in found if error is not None), None)

    def pieces(self, kind: CellType, part: Part) -> Iterator[Part]:
        """Split a part into the largest parts whose programs are compiled."""
        first, size = 0, part.batch_size
        while first < part.num_tasks:
            left = part.num_tasks - first
            num = max(k for k in TASKS_PER_PROGRAM if k <= left and (kind.index, k, size) in self.compiled)
            yield Part(part.words[first : first + num])
            first += num

    def wait(self) -> None:
        """Wait until a program is compiled that a launch needs; return at once if no launch waits."""
        if self._needed:
            wait(self._needed.values(), return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Compile no more; wait for programs that are being compiled."""
        self._threads.shutdown(cancel_futures=True)

    def _collect(self) -> None:
        """Take what the threads have compiled."""
        for futures in (self._needed, self._wanted):
            for key in [key for key, future in futures.items() if future is not None and future.done()]:
                future = futures.pop(key)
                assert future is not None
                error = future.exception()
                assert error is None or isinstance(error, Exception)
                if error is None:
                    self.compiled[key] = future.result()
                    continue
                self._errors[key] = error
                if futures is self._wanted:
                    _log.warning("%s: its tasks run one by one: %s", self._name(key), error)

    def _begin_wanted(self) -> None:
        """Compile the next wanted program if no other is being compiled.

        Only one is given to the threads at a time: a process that ends without `close` waits for all of them.
        """
        if not self._needed and not any(self._wanted.values()):
            key = next(iter(self._wanted), None)
            if key is not None:
                self._wanted[key] = self._threads.submit(self._compile, key)

    def _name(self, key: Key) -> str:
        kind, num, size = key
        return f"{self._types.types[kind].name} {num} x {size}"

    def _compile(self, key: Key) -> jax.stages.Compiled:
        return self._program(key).lower().compile()

    def _program(self, key: Key) -> Program:
        kind, num, size = key
        program = self._programs[kind]
        shapes = (
            self._pool(self._types.types[kind].state_kind),
            tuple(self._pool(one) for one in program.other_kinds),
            tuple(self._here(one) for one in program.weights),
            self._here(words_shape(self._types.types[kind], size, num)),
        )
        return Program(self._functions[kind], shapes, {})

    def _pool(self, kind: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self._here(one) for one in pool_shapes(self._types.kinds[kind], self._num_rows))

    def _here(self, one: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=self._sharding)
