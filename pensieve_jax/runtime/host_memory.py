"""Host memory: what this process can still take, and how much of it jaxlib may pin for GPUs.

Owns: the reading of Linux's own figures, and raising jaxlib's limit, which has to be done before JAX has a
client for GPUs.
Does not know: what the memory is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pensieve_jax.runtime.asynchronous_launches import has_clients

_MEMINFO = Path("proc/meminfo")
_OWN_CGROUPS = Path("proc/self/cgroup")
_MOUNT = Path("sys/fs/cgroup")
VARIABLE: Final = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Of jaxlib: so many times 2**30 bytes."""
OWN_LIMIT_GB: Final = 64
"""Of jaxlib 0.11.2, where the variable is not set."""
_set_here: set[str] = set()
"""Limits that the environment has from here, and not from whoever started the process."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping: the machine's and every control group's, the least of all.

    None where none of them is known.

    Args:
      root: of the file system; tests have one of their own.
    """
    known = [*_machine_bytes(root), *_cgroup_bytes(root)]
    return min(known) if known else None


def allow_pinning(num_bytes: int, available: int | None) -> None:
    """Let so much be pinned and a fifth more, unless the environment says how much.

    Regions of jaxlib's allocator do not fill up to the last byte, and copies of weights pass through it. It
    takes regions twice as large as those before while the limit lets it, so that all of the limit may be
    pinned in the end. Where JAX has been used before it is too late, and nothing is set.

    Args:
      num_bytes: of what will be kept.
      available: bytes that the machine has for this; the fifth is what fits into 95% of them. None: unknown.
    """
    most = num_bytes * 6 // 5
    if available is not None:
        most = max(min(most, available * 19 // 20), num_bytes)
    limit_gb = -(-most // 2**30)
    now = os.environ.get(VARIABLE)
    is_others = now is not None and now not in _set_here
    if is_others or limit_gb <= int(now or OWN_LIMIT_GB) or has_clients():
        return
    os.environ[VARIABLE] = str(limit_gb)
    _set_here.add(os.environ[VARIABLE])


def _machine_bytes(root: Path) -> Iterator[int]:
    for line in _lines(root / _MEMINFO):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """What each control group leaves: those of this process, up to the root of the mount."""
    for line in _lines(root / _OWN_CGROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / _MOUNT
            names = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / _MOUNT / "memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = mount / path.strip("/")
        # Inside a container the path may be the host's, of which only the mount's root is seen here.
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                yield from _group_bytes(directory, *names)


def _group_bytes(directory: Path, limit_name: str, used_name: str, cached_name: str) -> Iterator[int]:
    limit, used = ("".join(_lines(directory / name)) for name in (limit_name, used_name))
    if not limit.isdigit() or not used.isdigit():
        return  # "max", or not a group with a limit
    cached = 0  # file pages that the kernel gives up when asked
    for line in _lines(directory / "memory.stat"):
        name, _, value = line.partition(" ")
        cached = int(value) if name == cached_name else cached
    yield max(int(limit) - int(used) + cached, 0)


def _lines(path: Path) -> list[str]:
    """Nothing for a file that this system does not have, or does not show."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
