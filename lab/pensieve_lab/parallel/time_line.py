"""Activity of several GPUs on one time line: kernels, collectives, gaps, and waiting times.

Owns: the arithmetic over traces of devices.
Does not know: how they were traced, or what ran.
Called by `parallel.shared_steps`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve_lab.steps.device_trace import Kernel, summary

_EXCHANGE = re.compile(
    r"all.?reduce|all.?gather|nccl|sum_of_rows|shares_by_|reduce.?scatter|barrier", re.IGNORECASE
)


def is_exchange(name: str) -> bool:
    """Return whether a kernel of that name is a collective of several devices."""
    return _EXCHANGE.search(name) is not None


def time_line(kernels: Mapping[int, Sequence[Kernel]], num_steps: int, num_events: int) -> dict[str, Any]:
    """Return figures of traced kernels by device, each in order of start times; {} without any.

    Args:
      kernels: of every device.
      num_steps: number of traced steps.
      num_events: number of last kernels of each device to list one by one.
    """
    traced = {device: list(ran) for device, ran in kernels.items() if ran}
    if not traced:
        return {}
    return {
        "devices": {str(device): _device(ran, num_steps) for device, ran in traced.items()},
        "exchanges": _meetings(list(traced.values()), num_steps),
        "events": _events(traced, num_events),
    }


def _device(ran: Sequence[Kernel], num_steps: int) -> dict[str, Any]:
    """Return a device's seconds per step: of all kernels, of collectives, and of the gaps around them."""
    exchanges = [kernel for kernel in ran if is_exchange(kernel.name)]
    others = [kernel for kernel in ran if not is_exchange(kernel.name)]
    before = {True: 0.0, False: 0.0}
    end = ran[0].start_ns
    previous_exchanged = False
    for kernel in ran:
        gap = max(kernel.start_ns - end, 0.0)
        before[previous_exchanged or is_exchange(kernel.name)] += gap
        end = max(end, kernel.start_ns + kernel.duration_ns)
        previous_exchanged = is_exchange(kernel.name)
    return summary(list(ran), num_steps) | {
        "exchange_s": sum(kernel.duration_ns for kernel in exchanges) / num_steps * 1e-9,
        "num_exchanges": len(exchanges) / num_steps,
        "gaps_at_exchanges_s": before[True] / num_steps * 1e-9,
        "other_gaps_s": before[False] / num_steps * 1e-9,
        "computed_beside_s": _overlap(exchanges, others) / num_steps * 1e-9,
    }


def _overlap(first: Iterable[Kernel], second: Sequence[Kernel]) -> float:
    """Return the nanoseconds in which kernels of both sequences run."""
    total, at = 0.0, 0
    for one in first:
        end = one.start_ns + one.duration_ns
        while at < len(second) and second[at].start_ns + second[at].duration_ns <= one.start_ns:
            at += 1
        for other in second[at:]:
            if other.start_ns >= end:
                break
            other_end = other.start_ns + other.duration_ns
            total += max(min(end, other_end) - max(one.start_ns, other.start_ns), 0.0)
    return total


def _meetings(traced: Sequence[Sequence[Kernel]], num_steps: int) -> dict[str, Any]:
    """Return for the k-th collective on all devices its start skew, and its time after the last start."""
    exchanges = [[kernel for kernel in ran if is_exchange(kernel.name)] for ran in traced]
    found = {"counts": [len(ran) / num_steps for ran in exchanges]}
    if len(traced) < 2 or len({len(ran) for ran in exchanges}) > 1 or not exchanges[0]:
        return found  # not the same collectives, or none
    skews, alone = [], []
    for meeting in zip(*exchanges, strict=True):
        starts = [kernel.start_ns for kernel in meeting]
        skews.append(max(starts) - min(starts))
        alone.append(max(k.start_ns + k.duration_ns for k in meeting) - max(starts))
    return found | {
        "skew_s": _spread(skews),
        "together_s": _spread(alone),
        "waited_s": sum(skews) / num_steps * 1e-9,
        "exchanged_s": sum(alone) / num_steps * 1e-9,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered) * 1e-9,
        "p90": ordered[round(0.9 * last)] * 1e-9,
        "max": ordered[-1] * 1e-9,
    }


def _events(traced: Mapping[int, Sequence[Kernel]], num_events: int) -> dict[str, Any]:
    """Return each device's last kernels: index of the name, microseconds from the first listed start."""
    listed = {device: ran[max(0, len(ran) - num_events) :] for device, ran in traced.items()}
    names = sorted({kernel.name for ran in listed.values() for kernel in ran})
    origin = min((ran[0].start_ns for ran in listed.values() if ran), default=0.0)
    return {
        "names": names,
        "rows": {
            str(device): [
                [
                    names.index(kernel.name),
                    round((kernel.start_ns - origin) * 1e-3, 3),
                    round(kernel.duration_ns * 1e-3, 3),
                ]
                for kernel in ran
            ]
            for device, ran in listed.items()
        },
    }
