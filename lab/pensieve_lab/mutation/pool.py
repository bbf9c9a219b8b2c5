"""Workers, each with a copy of the checkout.

Owns: the worker processes, their environment and their copies.
Does not know: which mutants there are, or which tests are worth running.
Called by `programs.run_mutants`, `mutation.coverage_map` and `mutation.trial`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from pensieve_jax import ConfigError
from pensieve_lab.mutation.pytest_process import COMPILATION_CACHE
from pensieve_lab.mutation.trees import Tree, tracked_files

# Seed of the random tests, so that a verdict can be repeated.
_TESTS_SEED: Final = "1"


class WorkerError(RuntimeError):
    """A worker ended unexpectedly."""


class Worker:
    """One worker process and its copy of the checkout."""

    def __init__(self, tree: Tree, modules: Sequence[str], environment: dict[str, str]) -> None:
        """Start the process; it imports the modules once for all runs."""
        self.tree = tree
        # short, because socket paths, which are limited, begin with it
        self._scratch = tempfile.mkdtemp(prefix="mutants-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pensieve_lab.mutation.worker", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C ends the driver, and the worker ends with it
        )
        self._read()

    def run(self, **job: Any) -> dict[str, Any]:
        """Run pytest on files of the copy."""
        assert self._process.stdin is not None
        job = {"root": str(self.tree.path), "scratch": str(Path(self._scratch, "run"))} | job
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._read())
        return reply

    def close(self) -> None:
        """End the process and remove what it wrote."""
        self._process.kill()
        self._process.communicate()
        subprocess.run(["rm", "-rf", self._scratch], check=True)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"A worker ended with status {self._process.wait()}; see its messages above.")
        return line


class Pool:
    """Workers that take jobs as they become free."""

    def __init__(self, root: Path, build: Path, num_workers: int, modules: Sequence[str] = ()) -> None:
        """Copy the checkout and start the workers.

        Raises:
          ConfigError: another run uses the copies.
        """
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(_locked(build))
        files = tracked_files(root)
        environment = _environment(build)
        self._free: queue.Queue[Worker] = queue.Queue()
        self._num_workers = num_workers
        for number in range(num_workers):
            tree = Tree(root, build / f"tree{number}", files)
            worker = Worker(tree, modules, environment)
            self._stack.callback(worker.close)
            self._free.put(worker)

    def __enter__(self) -> Pool:
        """Return the running pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers and what they run."""
        self._stack.close()

    def map[T, R](self, work: Callable[[Worker, T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield results as they come."""

        def do(item: T) -> R:
            worker = self._free.get()
            try:
                return work(worker, item)
            finally:
                self._free.put(worker)

        executor = ThreadPoolExecutor(self._num_workers)
        try:
            for future in as_completed([executor.submit(do, item) for item in items]):
                yield future.result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _locked(build: Path) -> Iterator[None]:
    build.mkdir(parents=True, exist_ok=True)
    with (build / "in_use.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("--root", str(build), "free of another run", "wait for its end") from None
        yield


def _environment(build: Path) -> dict[str, str]:
    """Return the caller's environment, a fixed seed for random tests, and a compilation cache for mutants."""
    lab = str(Path(__file__).parents[2])
    cache = build / "compiled"
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o700)
    return os.environ | {
        "PYTHONPATH": lab,
        "TESTS_SEED": _TESTS_SEED,
        COMPILATION_CACHE: str(cache),
    }
