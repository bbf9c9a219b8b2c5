"""Figures reported for a load point.

Owns: the figures of a measured run and their units, and when a run is void. Latencies, throughput and hit
rates are defined in `pensieve_lab.workload.figures`, for simulated and measured runs alike.
Does not know: how a run was measured, tables or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pensieve_lab.common.spread import percentiles
from pensieve_lab.serving.host_parts import MAX_MS, PARTS
from pensieve_lab.serving.run import Run
from pensieve_lab.workload import UNITS as ANSWER_UNITS
from pensieve_lab.workload import answer_figures, step_figures, throughput

UNITS = ANSWER_UNITS | {
    "*_s": "seconds",
    "seconds": "length of the window, or until the last answer if it has no end",
    "rate": "conversations that arrive per second; null: as recorded, or all at once",
    "sessions_digest": "SHA-256 of arrivals and lengths; see serving/load_points.py",
    "kv_bytes": "device memory given to the KV cache; null: known only to the system",
    "left_out": "load points skipped because of --max_run_s; in the last document of a run",
    "latency_s": "seconds from arrival to the last token, of answered requests",
    "latency_at_least_s": "the same, with unanswered requests until the end of the run",
    "client_lag_s": "seconds from when a turn was due until its user handed it over",
    "normalized_latency_of_ended_s": "normalized_latency_s of answers that ended in the window",
    "host_step_s": "host seconds from a step's ids to the end of the next dispatch, with a step in flight",
    "host_cpu_step_s": "CPU seconds of the serving thread per step",
    "dispatch_step_s": "host seconds within a step's dispatch: programs, and copies that start with it",
    "device_wait_s": "seconds blocked until a step's ids came",
    "num_late_steps": "steps whose ids were already on the host when asked for: the device may have waited",
    "host_parts_s": "host_step_s by part, including users between steps; see serving/host_parts.py",
    "host_steps_by_ms": "number of steps by whole milliseconds of host time; the last: that or longer",
    "swap_out_copy_s, swap_in_copy_s": "mean seconds from the request of a chunk's copy to its completion",
}
"""Units of the JSON line of a report."""
COUNTERS = (
    "num_steps",
    "num_suspensions",
    "num_dropped_chunks",
    "num_forced_swap_outs",
    "num_prefetched_chunks",
    "swapped_in_bytes",
    "swapped_out_bytes",
    "transfer_stall_s",
    "swap_dispatch_s",
    "device_wait_s",
    "num_late_steps",
    "num_compilations",
)


def figures(run: Run, max_lag_s: float) -> dict[str, Any]:
    """Return figures by the names of `UNITS`; figures without data, or unknown to the server, are None."""
    window = run.window
    arrived = [answer for answer in run.answers if window.has(answer.turn.arrival_s)]
    ended = [answer for answer in run.answers if window.has(answer.end_s)]
    has_end = math.isfinite(window.end_s)
    last_s = window.end_s if has_end else max((answer.end_s for answer in ended), default=window.start_s)
    seconds = last_s - window.start_s
    lag = _lag(run)
    latency_s = [answer.end_s - answer.turn.arrival_s for answer in arrived]
    return {
        "void": lag is not None and lag["p99"] > max_lag_s,
        "client_lag_s": lag,
        "seconds": seconds,
        "num_requests": len(arrived),
        "num_unfinished": run.num_unfinished,
        "num_refused": run.num_refused,
        "sent_requests_per_s": (len(arrived) + run.num_unfinished) / seconds if seconds else None,
        **throughput(ended, seconds),
        "latency_s": percentiles(latency_s),
        "latency_at_least_s": percentiles([*latency_s, *run.unfinished_s]),
        **answer_figures(arrived),
        "normalized_latency_of_ended_s": answer_figures(ended)["normalized_latency_s"],
        **{name: run.counters.get(name) for name in COUNTERS},
        "tokens_per_step": _ratio(run.counters, "num_step_tokens", "num_steps"),
        "host_step_s": _ratio(run.counters, "host_s", "num_host_steps"),
        "dispatch_step_s": _ratio(run.counters, "dispatch_s", "num_steps"),
        "host_cpu_step_s": _ratio(run.counters, "host_cpu_s", "num_steps"),
        "host_parts_s": _host_parts_s(run.counters),
        "host_steps_by_ms": _host_steps_by_ms(run.counters),
        "swap_out_copy_s": _ratio(run.counters, "swap_out_s", "num_timed_swap_outs"),
        "swap_in_copy_s": _ratio(run.counters, "swap_in_s", "num_timed_swap_ins"),
        "steps": step_figures(run.steps),
    }


def _lag(run: Run) -> dict[str, float] | None:
    """Return the lags of turns that were due in the window."""
    lags = [lag.lag_s for lag in run.lags if run.window.has(lag.due_s)]
    if not lags:
        return None
    p50, p99 = np.percentile(lags, [50, 99]).tolist()
    return {"p50": p50, "p99": p99, "max": max(lags)}


def _host_parts_s(counters: Mapping[str, float]) -> dict[str, float] | None:
    """Return mean seconds of each part, of steps that followed others."""
    if not counters.get("num_host_steps"):
        return None
    return {part: counters[f"host_{part}_s"] / counters["num_host_steps"] for part in PARTS}


def _host_steps_by_ms(counters: Mapping[str, float]) -> dict[str, int] | None:
    """Return the number of steps by milliseconds, without empty entries."""
    if not counters.get("num_host_steps"):
        return None
    counts = {ms: int(counters[f"host_steps_of_{ms}_ms"]) for ms in range(MAX_MS + 1)}
    return {str(ms): count for ms, count in counts.items() if count}


def _ratio(counters: Mapping[str, float], name: str, per: str) -> float | None:
    return counters[name] / counters[per] if name in counters and counters.get(per) else None
