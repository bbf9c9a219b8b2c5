"""Where a document comes from: the commit, its source files, the command and the machine.

Owns: these fields, the digest of the source files, and how a copy without the commit names it.
Does not know: what was measured, or which documents are kept.

A commit is named together with a digest of the source files that ran. `commit_digest` computes the same
digest from the history, so a check finds a document that names another commit than the one that ran.
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
"""Names the commit of a copy whose git history lacks it, as `print_revision` prints it."""
_SOURCE_FOLDERS = ("model_defs", "pallas_kernels", "pensieve_jax", "lab/pensieve_lab", "scripts")
_SOURCE_SUFFIXES = (".json", ".py", ".safetensors")
_PACKAGES = ("pensieve-jax", "jax", "jaxlib", "flax", "numpy")
# Of what may change how something runs; `runtime/executable_environment.py` has what changes executables.
_VARIABLE_PREFIXES = (
    *("CUDA_", "JAX_", "MOSAIC_GPU_", "NCCL_", "NVIDIA_TF32", "PJRT_", "TRITON_", "VLLM_", "XLA_"),
)
_SECRET_SUFFIXES = ("_KEY", "_TOKEN")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_TIMEOUT_S = 30.0  # nvidia-smi without its persistence daemon takes seconds


class SourceState(NamedTuple):
    """The source files of this tree.

    Attributes:
      revision: the commit; None where neither a git history nor `REVISION_VARIABLE` names one.
      tree_is_clean: whether the files are those of the commit; None without a commit.
      source_digest: SHA-256 over the files; None for an installed package.
    """

    revision: str | None
    tree_is_clean: bool | None
    source_digest: str | None


def provenance(device: str) -> dict[str, Any]:
    """Return the fields that every document has: machine, versions, source state, command and environment."""
    return {
        "hardware": {"device": device, **_host()},
        "versions": {"python": platform.python_version(), **_versions()},
        **source_state()._asdict(),
        "command": shlex.join([Path(sys.executable).name, *_program()]),
        "environment": _environment(),
    }


@functools.cache
def source_state() -> SourceState:
    """Return the state of this tree at the first call, which a launcher with `--json` makes before `main`.

    Raises:
      ConfigError: `REVISION_VARIABLE` is malformed or belongs to other files.
    """
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return SourceState(None, None, None)  # installed, perhaps within an unrelated checkout
    return read_source_state(root, os.environ.get(REVISION_VARIABLE))


def read_source_state(root: Path, named: str | None) -> SourceState:
    """Return the state of the tree at `root`; `named` counts before the history, which may be an older one.

    Raises:
      ConfigError: `named` is malformed or belongs to other files.
    """
    digest = tree_digest(root)
    if named is None:
        commit = (git(root, "rev-parse", "HEAD") or "").strip() if (root / ".git").exists() else ""
        if not commit:  # no history, or one that git refuses to read
            return SourceState(None, None, digest)
        return SourceState(commit, commit_digest(root, commit) == digest, digest)
    commit, _, committed = named.partition(":")
    if len(commit) != 40 or len(committed) != 64:
        limit = "COMMIT:DIGEST, as lab/pensieve_lab/programs/print_revision.py prints it"
        raise ConfigError(REVISION_VARIABLE, named, limit)
    if committed != digest:
        limit = f"of these source files, whose digest is {digest}"
        hint = "copy the clean tree again, or print the revision of the tree that was copied"
        raise ConfigError(REVISION_VARIABLE, named, limit, hint)
    return SourceState(commit, True, digest)


def tree_digest(root: Path) -> str:
    """Return the digest of the source files below `root`, whether git knows them or not."""
    found = {}
    for folder in _SOURCE_FOLDERS:
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root).as_posix()
            if _is_source(name) and path.is_file():
                found[name] = _blob_id(path.read_bytes())
    return _digest(found.items())


def commit_digest(root: Path, commit: str) -> str | None:
    """Return the digest of the source files of a commit; None where the history at `root` lacks it."""
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
    """Return what git prints about the repository at `root`; None where it fails or is not installed."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _is_source(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _SOURCE_SUFFIXES and "__pycache__" not in path.parts


def _blob_id(content: bytes) -> str:
    """Return the name that git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(blobs: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"{blob} {name}\n" for name, blob in sorted(blobs))
    return hashlib.sha256(lines.encode()).hexdigest()


def _program() -> list[str]:
    """Return the arguments of the interpreter: a module by its name where `-m` started it."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.origin == sys.argv[0]:
        return ["-m", module.name.removesuffix(".__main__"), *sys.argv[1:]]
    return sys.argv


@functools.cache
def _host() -> dict[str, Any]:
    """Return processor, memory and GPUs of this host. GPUs are all that the driver lists."""
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
