"""Provenance of a document: the commit, its source files, the command and the machine.

Owns: these fields, the digest of the source files, and the variable that names the commit of a copied tree.
Does not know: the measurement, or which documents are stored.

A document names a commit and a digest of the source files that ran. `commit_digest` computes the same digest
from the git history, so a check finds documents that name a commit other than the one that ran.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pensieve_jax import ConfigError

REVISION_VARIABLE = "PENSIEVE_REVISION"
"""Variable that names the commit of a copied tree without git history, as printed by `print_revision`."""
_SOURCE_FOLDERS = ("model_defs", "pallas_kernels", "pensieve_jax", "lab/pensieve_lab", "scripts")
_SOURCE_SUFFIXES = (".json", ".py", ".safetensors")
_PACKAGES = ("pensieve-jax", "jax", "jaxlib", "flax", "numpy")
# Variables that may affect a run. `runtime/executable_environment.py` lists those that affect executables.
_VARIABLE_PREFIXES = (
    *("CUDA_", "JAX_", "MOSAIC_GPU_", "NCCL_", "NVIDIA_TF32", "PJRT_", "TRITON_", "VLLM_", "XLA_"),
)
_SECRET_SUFFIXES = ("_KEY", "_TOKEN")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_TIMEOUT_S = 30.0  # without its persistence daemon, nvidia-smi takes seconds


class SourceState(NamedTuple):
    """State of the source files of this tree.

    Attributes:
      revision: the commit; None if neither a git history nor `REVISION_VARIABLE` names one.
      tree_is_clean: whether the files equal those of the commit; None without a commit.
      source_digest: SHA-256 over the files; None for an installed package.
    """

    revision: str | None
    tree_is_clean: bool | None
    source_digest: str | None


def provenance(device: str) -> dict[str, Any]:
    """Return the common fields of all documents: machine, versions, source state, command, environment."""
    return {
        "hardware": {"device": device, **_host()},
        "versions": {"python": platform.python_version(), **_versions()},
        **source_state()._asdict(),
        "command": shlex.join([Path(sys.executable).name, *_program()]),
        "environment": _environment(),
    }


@functools.cache
def source_state() -> SourceState:
    """Return the state of this tree at the first call, which launchers with `--json` make before `main`.

    Raises:
      ConfigError: `REVISION_VARIABLE` is malformed or belongs to other files.
    """
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return SourceState(None, None, None)  # installed, perhaps within an unrelated checkout
    return read_source_state(root, os.environ.get(REVISION_VARIABLE))


def read_source_state(root: Path, named: str | None) -> SourceState:
    """Return the state of the tree at `root`. `named` overrides the git history, which may be older.

    Raises:
      ConfigError: `named` is malformed or belongs to other files.
    """
    digest = tree_digest(root)
    if named is None:
        commit = (git(root, "rev-parse", "HEAD") or "").strip() if (root / ".git").exists() else ""
        if not commit:  # no history, or git refuses to read it
            return SourceState(None, None, digest)
        return SourceState(commit, commit_digest(root, commit) == digest, digest)
    commit, _, committed = named.partition(":")
    if len(commit) != 40 or len(committed) != 64:
        limit = "COMMIT:DIGEST, as lab/pensieve_lab/programs/print_revision.py prints it"
        raise ConfigError(REVISION_VARIABLE, named, limit)
    if committed != digest:
        limit = f"of these source files, whose digest is {digest}"
        hint = "copy the clean tree again, or print the revision of the copied tree"
        raise ConfigError(REVISION_VARIABLE, named, limit, hint)
    return SourceState(commit, True, digest)


def tree_digest(root: Path) -> str:
    """Return the digest of the source files below `root`, including files that git does not track."""
    found = {}
    for folder in _SOURCE_FOLDERS:
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root).as_posix()
            if _is_source(name) and path.is_file():
                found[name] = _blob_id(path.read_bytes())
    return _digest(found.items())


def commit_digest(root: Path, commit: str) -> str | None:
    """Return the digest of the source files of a commit; None if the history at `root` lacks it."""
    listed = git(root, "ls-tree", "-r", "-z", "--full-tree", commit, *_SOURCE_FOLDERS)
    if listed is None:
        return None
    found = {}
    for entry in filter(None, listed.split("\0")):
        fields, _, name = entry.partition("\t")
        if _is_source(name):
            found[name] = fields.split()[2]
    return _digest(found.items())


def git(root: Path, *arguments: str) -> str | None:
    """Return git's output for the repository at `root`; None if git fails or is not installed."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _is_source(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _SOURCE_SUFFIXES and "__pycache__" not in path.parts


def _blob_id(content: bytes) -> str:
    """Return git's object id of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(blobs: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"{blob} {name}\n" for name, blob in sorted(blobs))
    return hashlib.sha256(lines.encode()).hexdigest()


def _program() -> list[str]:
    """Return the arguments of the interpreter, with `-m` and the module's name if it was started so."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.origin == sys.argv[0]:
        return ["-m", module.name.removesuffix(".__main__"), *sys.argv[1:]]
    return sys.argv


@functools.cache
def _host() -> dict[str, Any]:
    """Return processor, memory and GPUs of this host. The GPUs are all those that the driver lists."""
    return {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, str]]:
    try:
        told = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in told.stdout.splitlines() if line.strip()]
    return [{"name": name.strip(), "driver": driver.strip()} for name, _, driver in rows]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _environment() -> dict[str, str]:
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(_VARIABLE_PREFIXES) and not name.endswith(_SECRET_SUFFIXES)
    }


def _versions() -> dict[str, str]:
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed
