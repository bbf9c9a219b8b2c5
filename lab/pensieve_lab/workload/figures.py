"""Figures of a run.

Owns: the definitions. A turn counts if it was answered within the measured part of the run. Its latency runs
from its arrival, so waiting for the engine's loop is part of it.
Does not know: where answers come from, tables or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pensieve_lab.common.spread import percentiles
from pensieve_lab.workload.turns import Answer

UNITS = {
    "*_s": "seconds of virtual time",
    "*_per_s": "1/second",
    "*_tokens": "tokens",
    "*_bytes": "bytes",
    "*_rate": "share of the history tokens of returning turns that were reused from a tier",
    "normalized_latency_s": "seconds from arrival to the last token, per output token",
    "first_token_s": "seconds from arrival to the first token",
    "output_token_s": "seconds per output token after the first",
    "wasted_tokens": "tokens computed again because their request was suspended",
    "steps": "by bucket (padded query tokens): steps, mean wall seconds and mean query tokens",
    "device_busy_s": "seconds of steps, all replicas together",
    "device_busy": "share of time during which steps ran, mean over replicas",
    "padding_share_of_step_time": "share of step time spent on padding to the bucket",
}
"""Units of the JSON line of a report."""


def throughput(answers: Sequence[Answer], seconds: float) -> dict[str, float | None]:
    """Return requests and output tokens per second of `answers`, which came within `seconds`; None for 0
    s."""
    num_output = sum(answer.usage.output_tokens for answer in answers)
    return {
        "requests_per_s": len(answers) / seconds if seconds else None,
        "output_tokens_per_s": num_output / seconds if seconds else None,
    }


def answer_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return latencies of the answers, and where their tokens came from; see `UNITS`."""
    several = [answer for answer in answers if answer.usage.output_tokens > 1]
    return {
        "normalized_latency_s": percentiles([_latency_s(a) / a.usage.output_tokens for a in answers]),
        "first_token_s": percentiles([a.first_token_s - a.turn.arrival_s for a in answers]),
        "output_token_s": percentiles(
            [(a.end_s - a.first_token_s) / (a.usage.output_tokens - 1) for a in several]
        ),
        **_tokens(answers),
    }


def _tokens(answers: Sequence[Answer]) -> dict[str, float | int]:
    """Count the tokens of answered turns by where they came from."""
    usages = [answer.usage for answer in answers]
    returning = [answer.usage for answer in answers if answer.turn.num_history_tokens]
    on_gpu = sum(usage.reused_gpu_tokens for usage in returning)
    on_cpu = sum(usage.swapped_in_tokens for usage in returning)
    history = on_gpu + on_cpu + sum(usage.recomputed_tokens for usage in returning)
    return {
        "gpu_hit_rate": on_gpu / max(history, 1),
        "cpu_hit_rate": on_cpu / max(history, 1),
        "history_tokens": history,
        "recomputed_tokens": sum(usage.recomputed_tokens for usage in usages),
        "wasted_tokens": sum(usage.resume_recomputed_tokens for usage in usages),
        "prefilled_tokens": sum(usage.prefilled_tokens for usage in usages),
        "output_tokens": sum(usage.output_tokens for usage in usages),
    }


def _latency_s(answer: Answer) -> float:
    return answer.end_s - answer.turn.arrival_s
