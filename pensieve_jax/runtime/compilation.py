"""XLA compilations: concurrent compilation, the number of compilations, and where executables are stored.

Owns: the threads that compile and load, the process-wide count, and the switch of JAX's persistent cache.
Does not know: what is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from pensieve_jax.runtime.executable_store import ExecutableStore, executables_directory
from pensieve_jax.runtime.program import Program, ProgramKeys

# JAX records this event around every compilation, even if the persistent cache answers it.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_MAX_NUM_THREADS = 8  # each holds a whole program in several forms
# The value is XLA's default. JAX caches compiled programs in memory by program and options. With explicit
# options, a program for a store is never one that JAX's persistent cache returned.
_STORE_OPTIONS = {"xla_embed_ir_in_executable": False}
_log = logging.getLogger(__name__)


class CompilationJob(NamedTuple):
    """A program to compile, its name for progress displays, and the callback that takes the executable."""

    name: str
    program: Program
    keep: Callable[[jax.stages.Compiled], None]


def compile_all(jobs: Iterable[CompilationJob], store: ExecutableStore | None = None) -> Generator[str]:
    """Compile every job, several at once while later ones are lowered; yield names as jobs finish.

    Programs in `store` are loaded from there without tracing or lowering; the others are added to it. JAX's
    own cache is off meanwhile, in the whole process. Programs are lowered on the thread that iterates, under
    its settings. Closing the generator drops jobs that have not begun and waits for those that have.
    """
    with contextlib.ExitStack() as stack:
        if store is not None:
            stack.enter_context(_without_jax_cache())
        pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_NUM_THREADS), thread_name_prefix="compile")
        stack.callback(pool.shutdown, cancel_futures=True)
        work, start_s = _Work(pool, store), time.perf_counter()
        for job in jobs:
            work.start(job)
            yield from work.finish(timeout_s=0.0)
        lowered_s = time.perf_counter()
        while work.running:
            yield from work.finish(timeout_s=None)
        waited_s = time.perf_counter() - lowered_s
        _log.info(
            "programs: %.1f s until all were lowered, %.1f s more to compile", lowered_s - start_s, waited_s
        )


class _Work:
    """Jobs that threads are loading or compiling."""

    def __init__(self, pool: ThreadPoolExecutor, store: ExecutableStore | None) -> None:
        self.running: dict[Future[jax.stages.Compiled | None], tuple[CompilationJob, str | None]] = {}
        self._pool, self._store, self._keys = pool, store, ProgramKeys()

    def start(self, job: CompilationJob) -> None:
        """Load the job's program in a thread, or lower it here and compile it in a thread."""
        key = None if self._store is None else self._key(job)
        if self._store is not None and key is not None and self._store.holds(key):
            self.running[self._pool.submit(self._store.load, key)] = job, key
        else:
            self._compile(job, key)

    def finish(self, timeout_s: float | None) -> Iterator[str]:
        """Hand over the finished executables, waiting for the first one; yield their names."""
        for future in wait(self.running, timeout_s, FIRST_COMPLETED).done:
            job, key = self.running.pop(future)
            compiled = future.result()
            if compiled is None:  # the stored file could not be used
                self._compile(job, key)
            else:
                job.keep(compiled)
                yield job.name

    def _compile(self, job: CompilationJob, key: str | None) -> None:
        store = None if key is None else self._store
        compile_one = functools.partial(_compile, job.program.lower(), key, store)
        self.running[self._pool.submit(compile_one)] = job, key

    def _key(self, job: CompilationJob) -> str | None:
        try:
            return self._keys.key(job.program)
        except TypeError as error:
            _log.warning("%s is not stored on disk: %s", job.name, error)
            return None


def _compile(
    lowered: jax.stages.Lowered, key: str | None, store: ExecutableStore | None
) -> jax.stages.Compiled:
    if store is None or key is None:
        return lowered.compile()
    compiled = lowered.compile(_STORE_OPTIONS)
    store.save(key, compiled)
    return compiled


class CompilationCounter:
    """A counter of all compilations of this process since it was made."""

    def __init__(self) -> None:
        self._num_before = _process_total().value

    @property
    def value(self) -> int:
        """Compilations of this process since the counter was made."""
        return _process_total().value - self._num_before


class _Total:
    """The count since the first counter of the process was made."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()  # JAX calls from every thread that compiles

    def on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Count the event if it is a compilation."""
        if event == _COMPILE_EVENT:
            with self._lock:
                self.value += 1


@functools.cache
def _process_total() -> _Total:
    """Return the only listener; JAX keeps listeners forever, so a process registers just one."""
    total = _Total()
    jax.monitoring.register_event_duration_secs_listener(total.on_event)
    return total


def keep_compilations_in(directory: str | None) -> None:
    """Store compiled programs in `directory` (None: nowhere) and load them from there, process-wide.

    This includes programs that compile within a second, which JAX would not store: a start runs many.

    Raises:
      ConfigError: another user may write to the directory, or it cannot be created.
    """
    if directory is not None:
        executables_directory(directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.config.jax_compilation_cache_dir == directory:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()  # JAX opens its cache once; without this it would keep the old directory


class _JaxCacheSwitch:
    """The previous state of JAX's cache, and how many users have switched it off."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_users = 0
        self.was_enabled = True


_switch = _JaxCacheSwitch()


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Compile without JAX's cache: a program that it returns cannot be serialized into a file that runs."""
    with _switch.lock:
        if not _switch.num_users:
            _switch.was_enabled = jax.config.jax_enable_compilation_cache
            _set_jax_cache(False)
        _switch.num_users += 1
    try:
        yield
    finally:
        with _switch.lock:
            _switch.num_users -= 1
            if not _switch.num_users:
                _set_jax_cache(_switch.was_enabled)


def _set_jax_cache(is_enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    compilation_cache.reset_cache()  # JAX reads the setting only once
