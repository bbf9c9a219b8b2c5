"""Compiled programs on disk, so that a start neither traces nor lowers what an earlier one made.

Owns: the files: when one may be used, how it is written, and when it goes.
Does not know: what the programs are (`program`), or what else they depend on (`executable_environment`).

JAX's own cache spares the compiler alone: before it is asked a program has been traced and lowered, which
takes seconds for each step of a large model, in Python, one after the other. Here a file's name says all
that its program depends on, so what is found under it can be run as it is. A file is code: see
`private_directory`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from pensieve_jax.runtime.executable_environment import SOURCE_DIGEST, environment, source_digest
from pensieve_jax.runtime.private_directory import is_private, make_private
from pensieve_jax.runtime.replacing import replacing

_log = logging.getLogger(__name__)
_FIELD = "runner.compilation_cache_dir"
_DIGEST_LEN = hashlib.sha256().digest_size
_SUFFIX, _TEMPORARY_SUFFIX = ".executable", ".tmp"
_STALE_S = 3600.0  # after which nobody is still writing a file
_MAX_UNUSED_BYTES = 2**30

# What reading and unpickling raise where a file is not what its name says, and what the runtime does.
_LOAD_ERRORS = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    jax.errors.JaxRuntimeError,
)
# What has no such form raises one of the first six: callbacks into Python, constants, some back ends.
_SAVE_ERRORS = (
    AttributeError,
    NotImplementedError,
    TypeError,
    ValueError,
    pickle.PicklingError,
    jax.errors.JaxRuntimeError,
    OSError,
)


def executables_directory(cache_dir: str) -> Path:
    """Where a cache directory has its executables; both are made where they are missing.

    Raises:
      ConfigError: somebody else may write to one of them, or it cannot be made.
    """
    directory = Path(cache_dir) / "executables"
    for path in (directory.parent, directory):
        make_private(path, _FIELD)
    return directory


class ExecutableStore:
    """The compiled programs of a directory that fit some devices and this process; safe to call in threads.

    Attributes:
      num_loaded: programs that came from files and have not been discarded.
    """

    def __init__(self, cache_dir: str, devices: Sequence[jax.Device]) -> None:
        """Read nothing yet.

        Args:
          cache_dir: `RunnerConfig.compilation_cache_dir`; executables have a directory of their own in it.
          devices: that programs run on, in their order.

        Raises:
          ConfigError: somebody else may write to the directory, or it cannot be made.
        """
        self._directory = executables_directory(cache_dir)
        self._devices = tuple(devices)
        self._environment = repr(sorted(environment(self._devices).items()))
        self._lock = threading.Lock()
        self._used: set[Path] = set()  # files that were loaded or saved here
        # A process that has reloaded a module would else be given what its old source made.
        self._may_load = source_digest() == SOURCE_DIGEST
        self.num_loaded = 0

    def holds(self, key: str) -> bool:
        """Whether there is a file that may be loaded; what is in it shows when it is."""
        return self._may_load and self._path(key).is_file()

    def load(self, key: str) -> jax.stages.Compiled | None:
        """The program of `key`, ready to run; None where there is none that can be used, which is logged."""
        path = self._path(key)
        try:
            body = _read(path)
            payload, in_tree, out_tree = pickle.loads(body)
            client = self._devices[0].client
            compiled = deserialize_and_load(
                payload, in_tree, out_tree, client, execution_devices=self._devices
            )
        except _LOAD_ERRORS as error:
            _log.warning("%s cannot be used (%s); its program is compiled again", path, error)
            return None
        self._mark_used(path)
        with self._lock:
            self.num_loaded += 1
        return compiled

    def save(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Keep a program that the compiler made in this process; where that cannot be, it is logged.

        One that JAX's cache answered with must not come here: its file would be loaded, and fail when run.
        """
        if source_digest() != SOURCE_DIGEST:
            _log.warning("a compiled program is not kept: its source has changed since it was imported")
            return
        path = self._path(key)
        try:
            _write(path, pickle.dumps(serialize(compiled)))
        except _SAVE_ERRORS as error:
            _log.warning("a compiled program is not kept in %s: %s", self._directory, error)
            return
        self._mark_used(path)

    def discard_used(self) -> None:
        """Remove what was loaded or saved here, and load no more: some of it turned out not to run."""
        with self._lock:
            self._may_load = False
            for path in self._used:
                with contextlib.suppress(OSError):  # on a file system that is read only, say
                    path.unlink(missing_ok=True)
            self._used.clear()
            self.num_loaded = 0

    def tidy(self) -> None:
        """Bound the directory: half-written files go, and of what was not used here all but 1 GiB.

        Most recently used files stay: they are of other models, or of another version that is still in use.
        """
        with self._lock, contextlib.suppress(OSError):  # somebody else may tidy as well
            for path in self._directory.glob(f"*{_TEMPORARY_SUFFIX}"):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink(missing_ok=True)
            unused = set(self._directory.glob(f"*{_SUFFIX}")) - self._used
            num_bytes = 0
            for status, path in sorted(((path.stat(), path) for path in unused), key=_newest_first):
                num_bytes += status.st_size
                if num_bytes > _MAX_UNUSED_BYTES:
                    path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(f"{self._environment}\n{key}".encode()).hexdigest()
        return self._directory / f"{name}{_SUFFIX}"

    def _mark_used(self, path: Path) -> None:
        with self._lock:
            self._used.add(path)
        with contextlib.suppress(OSError):  # on a file system that is read only, say
            os.utime(path)


def _newest_first(file: tuple[os.stat_result, Path]) -> float:
    return -file[0].st_mtime


def _read(path: Path) -> bytes:
    """What was written; raises OSError or ValueError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if not is_private(os.fstat(file.fileno())):
            raise ValueError("somebody else can write to it")
        content = file.read()
    digest, body = content[:_DIGEST_LEN], content[_DIGEST_LEN:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("it is damaged")
    return body


def _write(path: Path, body: bytes) -> None:
    """Under its name a file is whole, whoever writes it at the same time."""
    with replacing(path, _TEMPORARY_SUFFIX) as temporary:
        temporary.write_bytes(hashlib.sha256(body).digest() + body)
