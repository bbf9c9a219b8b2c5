"""Disk cache of simulated points, from which an interrupted run resumes.

Owns: the cache key. It covers the point, its traces, this repository's code, and the first two version
numbers of Python and numpy.
Does not know: how points are simulated, or by how many processes.
Called by `experiments.pool`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from functools import cache
from pathlib import Path

import numpy as np

from pensieve_lab.experiments.points import Measured, Point, measure

_ROOT = Path(__file__).resolve().parents[3]
_CODE = (
    *(
        "pensieve_jax/**/*.py",
        "pensieve_jax/**/*.json",
        "lab/pensieve_lab/**/*.json",
        "lab/pensieve_lab/**/*.py",
    ),
    *("model_defs/**/*.py", "pallas_kernels/**/*.py"),
)


def measure_cached(point: Point, directory: Path) -> Measured:
    """Return a point's figures from its file in `directory`; if it is missing, measure and write it."""
    path = directory / f"{key(point)}.json"
    if path.exists():
        return Measured(point, json.loads(path.read_text()))
    measured = measure(point)
    text = json.dumps(measured.figures)
    assert json.loads(text) == measured.figures, "figures must be unchanged by JSON"
    # Rename a complete file, so that no other process or later run reads a partial one.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)
    return measured


def key(point: Point) -> str:
    """Return the hash of everything that a point's figures depend on, which names its file."""
    described = repr(point)
    for workload in (point.workload, point.earlier_workload):
        if workload is not None and workload.trace is not None:
            path = workload.trace[0]
            described = described.replace(repr(path), _digest(path))
    return hashlib.sha256(f"{_code_digest()}\n{described}".encode()).hexdigest()


@cache
def _code_digest() -> str:
    minor = [".".join(version.split(".")[:2]) for version in (platform.python_version(), np.__version__)]
    digest = hashlib.sha256(" ".join(minor).encode())
    for path in sorted(path for pattern in _CODE for path in _ROOT.glob(pattern)):
        digest.update(str(path.relative_to(_ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _digest(trace: Path) -> str:
    """Return the digest of a file, or of all files of a directory."""
    files = sorted(trace.rglob("*")) if trace.is_dir() else [trace]
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(str(path.relative_to(trace)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
