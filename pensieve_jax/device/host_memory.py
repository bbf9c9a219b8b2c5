"""How much memory the machine, or the container around this process, still has for it.

Owns: the reading of Linux's own figures.
Does not know: what it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("proc/meminfo")
_OWN_CGROUPS = Path("proc/self/cgroup")
_MOUNT = Path("sys/fs/cgroup")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping: the machine's and every control group's, the least of all.

    None where none of them is known.

    Args:
      root: of the file system; tests have one of their own.
    """
    known = [*_machine_bytes(root), *_cgroup_bytes(root)]
    return min(known) if known else None


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
