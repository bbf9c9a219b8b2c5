"""What is reported of a simulated run: as `workload.figures` has it, and what only a simulation knows.

Owns: what a simulation adds to those figures. Does not know: tables or files.
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
    """By name; see `UNITS`. Values of nothing are None."""
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
        # Steps count when they are dispatched, so a little more than all of the time may be busy.
        "device_busy": min(counters["device_busy_s"] / (seconds * num_replicas), 1.0) if seconds else None,
    }
