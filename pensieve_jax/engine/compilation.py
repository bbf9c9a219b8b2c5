"""XLA's compilations: several at a time, how many there were, and where they are kept.

Owns: the threads that compile, the process-wide count, and the switch of the persistent cache.
Does not know: what is compiled.
Called by: `model_runner`, `page_copies` for its jobs, and `assembly`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

# Recorded by JAX around every compilation, also around one that the persistent cache answers.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


_MAX_NUM_THREADS = 8  # each holds a whole program in several forms


class CompilationJob(NamedTuple):
    """A lowered program, its name for whoever shows progress, and what takes the executable."""

    name: str
    lowered: jax.stages.Lowered
    keep: Callable[[jax.stages.Compiled], None]


def compile_all(jobs: Iterable[CompilationJob]) -> Generator[str]:
    """Compile every job, several at a time while later ones are being lowered; yields names as they end.

    Closing it drops what has not begun and waits for what has.
    """
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_NUM_THREADS), thread_name_prefix="compile")
    try:
        running: dict[Future[jax.stages.Compiled], CompilationJob] = {}
        for job in jobs:
            running[pool.submit(job.lowered.compile)] = job
            yield from _finish(running, [future for future in running if future.done()])
        yield from _finish(running, as_completed(tuple(running)))
    finally:
        pool.shutdown(cancel_futures=True)


def _finish(
    running: dict[Future[jax.stages.Compiled], CompilationJob], futures: Iterable[Future[jax.stages.Compiled]]
) -> Iterator[str]:
    for future in futures:
        job = running.pop(future)
        job.keep(future.result())
        yield job.name


class CompilationCounter:
    """Counts the compilations of this process, whoever asks for them, from its making on."""

    def __init__(self) -> None:
        """Start at 0."""
        self._num_before = _process_total().value

    @property
    def value(self) -> int:
        """Compilations so far."""
        return _process_total().value - self._num_before


class _Total:
    """The count since the first counter of the process was made."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()  # JAX calls from whichever thread compiles

    def on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Count one, if it is a compilation."""
        if event == _COMPILE_EVENT:
            with self._lock:
                self.value += 1


@functools.cache
def _process_total() -> _Total:
    """The one listener: JAX keeps listeners for ever, so there is no more than one."""
    total = _Total()
    jax.monitoring.register_event_duration_secs_listener(total.on_event)
    return total


def keep_compilations_in(directory: str | None) -> None:
    """Keep compiled programs in `directory` (None: nowhere) and take them from there, process-wide.

    All of them, also those that compile within a second, which JAX would leave out: starting runs many.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.config.jax_compilation_cache_dir == directory:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()  # JAX opens its cache once; without this it would stay with the old one
