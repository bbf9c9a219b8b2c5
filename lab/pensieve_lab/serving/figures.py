"""What is reported of a load point.

Owns: the figures of a measured run and their units, and when a run is void. Latencies, throughput and hit
rates are defined in `pensieve_lab.workload.figures`, for simulated and measured runs alike.
Does not know: how a run came about, tables or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_lab.serving.host_parts import MAX_MS, PARTS
from pensieve_lab.serving.run import Run
from pensieve_lab.workload import UNITS as ANSWER_UNITS
from pensieve_lab.workload import answer_figures, step_figures, throughput

UNITS = ANSWER_UNITS | {
    "*_s": "seconds",
    "seconds": "of the window, or until the last answer where there is none",
    "rate": "conversations that begin in a second; null: as recorded, or all at once",
    "sessions_digest": "SHA-256 of who came when, with how many tokens; see serving/load_points.py",
    "kv_bytes": "of KV state in device memory, as the system was given; null where only it knows",
    "left_out": "load points that --max_run_s left no time for; told by the last document of a run",
    "latency_s": "seconds from arrival to the last token, of what was answered",
    "latency_at_least_s": "the same with what was not answered, until the run ended",
    "client_lag_s": "seconds from when a turn was due until its user handed it over",
    "normalized_latency_of_ended_s": "as normalized_latency_s, of answers that ended in the window",
    "host_step_s": "seconds of the host from a step's ids to the end of the next dispatch, a step in flight",
    "host_cpu_step_s": "seconds of CPU of the serving thread, per step",
    "dispatch_step_s": "seconds of the host within a step's dispatch: programs, copies that begin with it",
    "device_wait_s": "seconds blocked until a step's ids came",
    "num_late_steps": "steps whose ids were on the host when asked for: the device may have waited for it",
    "host_parts_s": "host_step_s part by part, users between steps included; see serving/host_parts.py",
    "host_steps_by_ms": "how many steps kept the host for so many whole milliseconds; the last: or more",
    "swap_out_copy_s, swap_in_copy_s": "mean seconds from asking for a chunk's copy until it is complete",
}
"""For the JSON line of a report."""
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
    """By name; see `UNITS`. Values of nothing, or that the server does not know, are None."""
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
        "latency_s": _spread(latency_s),
        "latency_at_least_s": _spread([*latency_s, *run.unfinished_s]),
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


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


def _lag(run: Run) -> dict[str, float] | None:
    """Of turns that were due in the window."""
    lags = [lag.lag_s for lag in run.lags if run.window.has(lag.due_s)]
    if not lags:
        return None
    p50, p99 = np.percentile(lags, [50, 99]).tolist()
    return {"p50": p50, "p99": p99, "max": max(lags)}


def _host_parts_s(counters: Mapping[str, float]) -> dict[str, float] | None:
    """Mean seconds of each part of steps that followed others."""
    if not counters.get("num_host_steps"):
        return None
    return {part: counters[f"host_{part}_s"] / counters["num_host_steps"] for part in PARTS}


def _host_steps_by_ms(counters: Mapping[str, float]) -> dict[str, int] | None:
    """Of the milliseconds that occurred."""
    if not counters.get("num_host_steps"):
        return None
    counts = {ms: int(counters[f"host_steps_of_{ms}_ms"]) for ms in range(MAX_MS + 1)}
    return {str(ms): count for ms, count in counts.items() if count}


def _ratio(counters: Mapping[str, float], name: str, per: str) -> float | None:
    return counters[name] / counters[per] if name in counters and counters.get(per) else None
