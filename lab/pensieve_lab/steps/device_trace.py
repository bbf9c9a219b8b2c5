"""Kernels and copies of GPUs during a call, from the profiler's trace.

Owns: reading the trace. Does not know: what ran.
"""

from __future__ import annotations

import operator
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

_NUM_KERNELS_SHOWN = 25
_DEVICE = "/device:GPU:"


class Kernel(NamedTuple):
    """Run of a kernel, in nanoseconds.

    Attributes:
      name: name of the kernel.
      start_ns: start, from any origin.
      duration_ns: time from start to end.
      program: number of its executable; None if the trace does not say.
    """

    name: str
    start_ns: float
    duration_ns: float
    program: int | None = None


class Activity(NamedTuple):
    """Interval of activity, in nanoseconds."""

    start_ns: float
    end_ns: float


class Trace(NamedTuple):
    """Kernels and copies of a GPU, each sorted by start; empty without a GPU."""

    kernels: list[Kernel]
    copies: list[Activity]  # between memories


def trace_devices(run: Callable[[], Any]) -> dict[int, Trace]:
    """Trace `run`; return kernels and copies between memories by GPU number, on one time line."""
    found: dict[int, Trace] = {}
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        (path,) = Path(directory).rglob("*.xplane.pb")
        for plane in ProfileData.from_file(str(path)).planes:
            if plane.name.startswith(_DEVICE):
                found[int(plane.name.removeprefix(_DEVICE))] = _trace(plane)
    return dict(sorted(found.items()))


def _trace(plane: Any) -> Trace:
    kernels: list[Kernel] = []
    copies: list[Activity] = []
    for line in plane.lines:
        if "Compute" in line.name or "Collective" in line.name:
            kernels += [_kernel(event) for event in line.events]
        elif "Memcpy" in line.name:
            copies += [Activity(event.start_ns, event.start_ns + event.duration_ns) for event in line.events]
    return Trace(sorted(kernels, key=lambda kernel: kernel.start_ns), sorted(copies))


def trace_activity(run: Callable[[], Any]) -> Trace:
    """Trace `run` on the first GPU alone."""
    return trace_devices(run).get(0, Trace([], []))


def trace_kernels(run: Callable[[], Any]) -> list[Kernel]:
    """Trace the kernels of `run` on the first GPU."""
    return trace_activity(run).kernels


def _kernel(event: Any) -> Kernel:
    program = next((value for name, value in event.stats if name == "program_id"), None)
    return Kernel(event.name, event.start_ns, event.duration_ns, None if program is None else int(program))


def summary(kernels: list[Kernel], num_steps: int) -> dict[str, Any]:
    """Return seconds per step (span, busy, idle), the longest gap, and seconds by kernel."""
    if not kernels:
        return {}
    ends, gaps = float(kernels[0].start_ns), []
    for kernel in kernels:
        gaps.append(max(kernel.start_ns - ends, 0.0))
        ends = max(ends, kernel.start_ns + kernel.duration_ns)
    span = ends - kernels[0].start_ns
    return {
        "span_s": span / num_steps * 1e-9,
        "idle_s": sum(gaps) / num_steps * 1e-9,
        "longest_gap_s": max(gaps) * 1e-9,
        "num_kernels": len(kernels) / num_steps,
        "kernels_s": seconds_by_kernel(kernels, num_steps),
    }


def seconds_by_kernel(kernels: Iterable[Kernel], num_steps: int) -> dict[str, float]:
    """Return seconds per step by name, of the kernels with the largest totals."""
    by_name: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_name[kernel.name] += kernel.duration_ns
    longest = sorted(by_name.items(), key=operator.itemgetter(1), reverse=True)[:_NUM_KERNELS_SHOWN]
    return {name: total / num_steps * 1e-9 for name, total in longest}
