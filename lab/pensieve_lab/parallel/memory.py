"""Memory use of devices: of arrays as JAX reports it, and of everything as the driver reports it.

Owns: the two readings.
Does not know: what ran.
Called by `programs.profile_parallel`.

Communication libraries use memory outside JAX's share, which JAX does not see.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from jax.sharding import Mesh

_NAMES = ("bytes_limit", "bytes_in_use", "peak_bytes_in_use")
_QUERY = ("--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")


def devices_memory(mesh: Mesh) -> list[dict[str, int]]:
    """Return every device's available readings in bytes; `driver_...` covers all processes."""
    stats: list[dict[str, Any]] = [device.memory_stats() or {} for device in mesh.devices.flat]
    found = [{name: one[name] for name in _NAMES if name in one} for one in stats]
    for one, line in zip(found, _driver_lines(), strict=False):
        used, total = (int(text) << 20 for text in line.split(","))
        one |= {"driver_used_bytes": used, "driver_total_bytes": total}
    return found


def _driver_lines() -> list[str]:
    """Return a line for each GPU, in MiB; empty without NVIDIA's tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []
