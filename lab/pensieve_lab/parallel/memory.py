"""Memory use of devices, as JAX's allocator and as the driver report it.

Owns: the two readings.
Does not know: what ran.
Called by `programs.profile_parallel`.

JAX reports only its own allocations. The driver also counts those of communication libraries such as NCCL.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from jax.sharding import Mesh

_NAMES = ("bytes_limit", "bytes_in_use", "peak_bytes_in_use")
_QUERY = ("--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")


def devices_memory(mesh: Mesh) -> list[dict[str, int]]:
    """Return the readings of every device in bytes; those named `driver_...` cover all processes."""
    stats: list[dict[str, Any]] = [device.memory_stats() or {} for device in mesh.devices.flat]
    found = [{name: one[name] for name in _NAMES if name in one} for one in stats]
    for one, line in zip(found, _driver_lines(), strict=False):
        used, total = (int(text) << 20 for text in line.split(","))
        one |= {"driver_used_bytes": used, "driver_total_bytes": total}
    return found


def _driver_lines() -> list[str]:
    """Return a line per GPU from nvidia-smi, in MiB; no lines if the tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []
