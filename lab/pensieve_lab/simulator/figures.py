"""Figures of a simulated run: those of `workload.figures`, and those that only a simulation knows.

Owns: the figures that a simulation adds. Does not know: tables or files.
"""

from __future__ import annotations

from typing import Any

from pensieve_lab.simulator.simulation import Outcome
from pensieve_lab.workload.figures import answer_figures, throughput
from pensieve_lab.workload.step_totals import step_figures

_COUNTERS = (
    "num_suspensions",
    "num_dropped_chunks",
    "num_forced_swap_outs",
    "num_prefetched_chunks",
    "swapped_in_bytes",
    "swapped_out_bytes",
    "transfer_stall_s",
    "num_steps",
)


def figures(outcome: Outcome, num_replicas: int) -> dict[str, Any]:
    """Return figures by the names of `UNITS`; figures without data are None."""
    answers, counters, seconds = outcome.answers, outcome.counters, outcome.seconds
    return {
        "num_requests": len(answers),
        "num_unfinished": outcome.num_unfinished,
        "num_refused": outcome.num_refused,
        "seconds": seconds,
        **throughput(answers, seconds),
        **answer_figures(answers),
        **{name: counters[name] for name in _COUNTERS},
        "steps": step_figures(outcome.steps),
        "tokens_per_step": counters["num_step_tokens"] / max(counters["num_steps"], 1),
        "host_step_s": counters["host_s"] / max(counters["num_steps"], 1),
        "padding_share_of_step_time": counters["padding_s"] / counters["device_busy_s"]
        if counters["device_busy_s"]
        else None,
        "device_busy_s": counters["device_busy_s"],
        # Steps count when they are dispatched, so the sum may slightly exceed the time.
        "device_busy": min(counters["device_busy_s"] / (seconds * num_replicas), 1.0) if seconds else None,
    }
