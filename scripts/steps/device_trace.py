"""What a GPU did, kernel by kernel, while something ran: from the profiler's own trace.

Owns: reading the trace. Does not know: what ran. Called by: benchmark_step, benchmark_packing.
"""

from __future__ import annotations

import operator
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

_NUM_KERNELS_SHOWN = 25


class Kernel(NamedTuple):
    """One run of a kernel on the compute stream; nanoseconds."""

    name: str
    start_ns: float
    duration_ns: float


def trace_kernels(run: Callable[[], Any]) -> list[Kernel]:
    """Kernels of the first GPU in the order of their starts, while `run` ran; none without a GPU."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        (path,) = Path(directory).rglob("*.xplane.pb")
        planes = [plane for plane in ProfileData.from_file(str(path)).planes if plane.name == "/device:GPU:0"]
        return sorted(
            (
                Kernel(event.name, event.start_ns, event.duration_ns)
                for plane in planes
                for line in plane.lines
                if "Compute" in line.name
                for event in line.events
            ),
            key=lambda kernel: kernel.start_ns,
        )


def summary(kernels: list[Kernel], num_steps: int) -> dict[str, Any]:
    """Seconds a step: from first to last kernel, busy, idle; the longest gap; time by kernel."""
    if not kernels:
        return {}
    ends, gaps = float(kernels[0].start_ns), []
    for kernel in kernels:
        gaps.append(max(kernel.start_ns - ends, 0.0))
        ends = max(ends, kernel.start_ns + kernel.duration_ns)
    span = ends - kernels[0].start_ns
    by_name: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_name[kernel.name] += kernel.duration_ns
    longest = sorted(by_name.items(), key=operator.itemgetter(1), reverse=True)[:_NUM_KERNELS_SHOWN]
    return {
        "span_s": span / num_steps * 1e-9,
        "idle_s": sum(gaps) / num_steps * 1e-9,
        "longest_gap_s": max(gaps) * 1e-9,
        "num_kernels": len(kernels) / num_steps,
        "kernels_s": {name: total / num_steps * 1e-9 for name, total in longest},
    }
