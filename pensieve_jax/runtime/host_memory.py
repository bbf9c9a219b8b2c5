"""Host memory: how much this process can still allocate, and how much of it jaxlib may pin for GPUs.

Owns: reading Linux's own figures, and raising jaxlib's limit, which must happen before JAX has a client for
GPUs.
Does not know: what the memory is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.runtime.asynchronous_launches import has_clients

_MEMINFO = Path("proc/meminfo")
_OWN_CGROUPS = Path("proc/self/cgroup")
_MOUNT = Path("sys/fs/cgroup")
VARIABLE: Final = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""A variable of jaxlib: the limit of pinned memory in units of 2**30 bytes."""
OWN_LIMIT_GB: Final = 64
"""The limit of jaxlib 0.11.2 if the variable is not set."""
_set_here: set[str] = set()
"""Values of the variable that this module has set, and not the user."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping: the minimum of the machine and every cgroup.

    None if no limit is known.

    Args:
      root: root of the file system; tests have one of their own.
    """
    known = [*_machine_bytes(root, "MemAvailable:"), *(left for _, left in _cgroups(root))]
    return min(known) if known else None


def total_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory of the machine, or the least limit of a cgroup if that is less.

    Return None if the system gives neither figure.

    Args:
      root: root of the file system; tests have one of their own.
    """
    known = [*_machine_bytes(root, "MemTotal:"), *(limit for limit, _ in _cgroups(root))]
    return min(known) if known else None


def pinnable_bytes() -> int:
    """Return the most bytes that can be kept pinned under jaxlib's present limit; see `allow_pinning`.

    Raises ConfigError for a limit that is not a number.
    """
    return _limit_gb() * 2**30 * 5 // 6


def allow_pinning(num_bytes: int, available: int | None) -> None:
    """Raise the limit of pinned memory to `num_bytes` and a fifth more, unless the user has set a limit.

    Regions of jaxlib's allocator are not used up to the last byte, and copies of weights pass through it.
    The allocator doubles its region size while the limit permits, so that all of the limit may be pinned in
    the end. If JAX has been used already, it is too late, and nothing is set.

    Args:
      num_bytes: bytes to keep pinned.
      available: available bytes of the machine; the limit is reduced to 95% of them, but not below
        `num_bytes`. None if unknown.

    Raises:
      ConfigError: the limit that is set is not a number.
    """
    most = num_bytes * 6 // 5
    if available is not None:
        most = max(min(most, available * 19 // 20), num_bytes)
    limit_gb = -(-most // 2**30)
    now, now_gb = os.environ.get(VARIABLE), _limit_gb()
    is_others = now is not None and now not in _set_here
    if is_others or limit_gb <= now_gb or has_clients():
        return
    os.environ[VARIABLE] = str(limit_gb)
    _set_here.add(os.environ[VARIABLE])


def _limit_gb() -> int:
    """Return jaxlib's limit in units of 2**30 bytes; raises ConfigError if what is set is not a number."""
    text = os.environ.get(VARIABLE) or str(OWN_LIMIT_GB)
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(VARIABLE, text, "a number of GiB", "such as 64, or unset it")
    return int(text)


def _machine_bytes(root: Path, name: str) -> Iterator[int]:
    for line in _lines(root / _MEMINFO):
        if line.startswith(name):
            yield int(line.split()[1]) * 1024


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and bytes left of each cgroup of this process, up to the root of the mount."""
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
        # Inside a container the path may be the host's; then only the mount's root is visible here.
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                yield from _group_bytes(directory, *names)


def _group_bytes(
    directory: Path, limit_name: str, used_name: str, cached_name: str
) -> Iterator[tuple[int, int]]:
    limit, used = ("".join(_lines(directory / name)) for name in (limit_name, used_name))
    if not limit.isdigit() or not used.isdigit():
        return  # "max", or not a group with a limit
    cached = 0  # file pages that the kernel frees on demand
    for line in _lines(directory / "memory.stat"):
        name, _, value = line.partition(" ")
        cached = int(value) if name == cached_name else cached
    yield int(limit), max(int(limit) - int(used) + cached, 0)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if this system does not have or show it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
