"""Compiled programs on disk, so that a start neither traces nor lowers what an earlier one made.

Owns: the files, and what must be the same for one to be used: versions, devices, JAX's settings, XLA's flags,
the source of this project, and whatever the program itself depends on, its key.
Does not know: what the programs are.
Called by: `compilation`.

JAX's own cache spares the compiler alone: before it is asked a program has been traced and lowered, which
takes seconds for each step of a large model, in Python, one after the other. A file is code that will be run:
a directory that others may write to is not for this, nor for JAX's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib
from jax.experimental.serialize_executable import deserialize_and_load, serialize

_log = logging.getLogger(__name__)
_PACKAGES = ("pensieve_jax", "model_defs", "pallas_kernels")  # what programs are traced from
_DIGEST_LEN = hashlib.sha256().digest_size
_SUFFIX = ".executable"


class ExecutableStore:
    """A directory of compiled programs for some devices."""

    def __init__(self, directory: Path, devices: Sequence[jax.Device]) -> None:
        """Read nothing yet; the directory is made when something is saved."""
        self._directory, self._devices = directory, tuple(devices)
        self._environment = _environment(self._devices)

    def holds(self, key: str) -> bool:
        """Whether there is a file; what is in it shows when it is loaded."""
        return self._path(key).is_file()

    def load(self, key: str) -> jax.stages.Compiled | None:
        """The program of `key`, ready to run; None where there is none that can be used, which is logged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, body = content[:_DIGEST_LEN], content[_DIGEST_LEN:]
        if hashlib.sha256(body).digest() != digest:
            _log.warning("%s is damaged; its program is compiled again", path)
            return None
        payload, in_tree, out_tree = pickle.loads(body)
        try:
            return deserialize_and_load(
                payload, in_tree, out_tree, self._devices[0].client, execution_devices=self._devices
            )
        except jax.errors.JaxRuntimeError as error:
            _log.warning("%s cannot be used (%s); its program is compiled again", path, error)
            return None

    def save(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Keep a program for later; where that cannot be, it is logged."""
        try:
            body = pickle.dumps(serialize(compiled))
            self._directory.mkdir(parents=True, exist_ok=True)
            # Under its name a file is whole, whoever writes it at the same time.
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(file.name, self._path(key))
        except (ValueError, NotImplementedError, OSError) as error:  # the first two: it has no such form
            _log.warning("a compiled program is not kept in %s: %s", self._directory, error)

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(f"{self._environment}\n{key}".encode()).hexdigest()
        return self._directory / f"{name}{_SUFFIX}"


def _environment(devices: Sequence[jax.Device]) -> str:
    """Everything but the program itself that a compiled program depends on."""
    settings = {
        name: value for name, value in jax.config.values.items() if not name.endswith(("_dir", "_cache"))
    }
    parts = [
        jax.__version__,
        jaxlib.__version__,
        devices[0].client.platform_version,
        [(device.id, device.device_kind) for device in devices],
        os.environ.get("XLA_FLAGS", ""),
        sorted((name, repr(value)) for name, value in settings.items()),
        _source_digest(),
    ]
    if devices[0].platform == "cpu":  # code for one processor may be none for another
        parts.append(_processor())
    return repr(parts)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    lines = info.read_text().splitlines()
    return repr(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _source_digest() -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        for root in map(Path, spec.submodule_search_locations):
            for path in sorted(root.rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
