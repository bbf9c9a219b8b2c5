"""The figures of a load point, computed again from its requests.

Owns: the definitions of lab/docs/serving_benchmark.md in separate code, so that an error in `serving.figures`
shows as a difference.
Does not know: documents, or where requests come from.
Called by `pages.result_documents`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_lab.serving.request_table import COLUMNS

_US = 1e-6
_PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
_TIME_TOLERANCE_S = 2e-6  # both times of a difference are rounded to a microsecond
_RELATIVE_TOLERANCE = 1e-6

Arrays = Mapping[str, Any]


def recomputed(arrays: Arrays, window_s: tuple[float, float], max_lag_s: float) -> dict[str, Any]:
    """Return every figure that the requests of a load point determine, by its name in the document."""
    columns = [arrays[name].tolist() for name in COLUMNS]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]
    start_us, end_us = (_whole_us(edge_s) for edge_s in window_s)

    def is_inside(time_us: float) -> bool:
        return start_us <= time_us < end_us

    answered = [row for row in rows if row["end_us"] >= 0]
    ended = [row for row in answered if is_inside(row["end_us"])]
    arrived = [row for row in answered if is_inside(row["arrival_us"])]
    waiting = [row for row in rows if row["end_us"] < 0]
    if math.isinf(end_us):
        end_us = max((row["end_us"] for row in ended), default=start_us)
    seconds = _US * (end_us - start_us)
    latency_s = [_US * (row["end_us"] - row["arrival_us"]) for row in arrived]
    waited_s = [_US * (int(arrays["run_end_us"]) - row["arrival_us"]) for row in waiting]
    lags_s = [
        _US * int(lag)
        for due, lag in zip(arrays["lag_due_us"], arrays["lag_us"], strict=True)
        if is_inside(due)
    ]
    lag = None if not lags_s else {**_percentiles(lags_s, ("p50", "p99")), "max": max(lags_s)}
    output_tokens = sum(row["output_tokens"] for row in ended)
    return {
        "void": lag is not None and lag["p99"] > max_lag_s,
        "client_lag_s": lag,
        "seconds": seconds,
        "num_requests": len(arrived),
        "num_unfinished": len(waiting),
        "sent_requests_per_s": _per_second(len(arrived) + len(waiting), seconds),
        "requests_per_s": _per_second(len(ended), seconds),
        "output_tokens_per_s": _per_second(output_tokens, seconds),
        "latency_s": _spread(latency_s),
        "latency_at_least_s": _spread([*latency_s, *waited_s]),
        "normalized_latency_s": _spread(_per_token_s(arrived)),
        "normalized_latency_of_ended_s": _spread(_per_token_s(ended)),
        "first_token_s": _spread([_US * (row["first_token_us"] - row["arrival_us"]) for row in arrived]),
        "output_token_s": _spread(
            [
                _US * (row["end_us"] - row["first_token_us"]) / (row["output_tokens"] - 1)
                for row in arrived
                if row["output_tokens"] > 1
            ]
        ),
        **_tokens(arrived),
    }


def differences(point: Mapping[str, Any], arrays: Arrays, window_s: tuple[float, float]) -> list[str]:
    """Return a sentence for each figure of a load point that is missing or contradicts its requests."""
    max_lag_s = point.get("max_client_lag_s")
    found = recomputed(arrays, window_s, math.inf if max_lag_s is None else max_lag_s)
    errors = [*_impossible(arrays), *_uncounted(point, arrays, window_s)]
    relative = max(_RELATIVE_TOLERANCE, _TIME_TOLERANCE_S / (found["seconds"] or math.inf))  # of rates
    for name, value in found.items():
        if name not in point:
            errors.append(f"{name} is missing; its requests give {_shown(value)}")
        elif not _is_equal(point[name], value, relative):
            errors.append(f"{name} is {_shown(point[name])}; its requests give {_shown(value)}")
    return errors


def _impossible(arrays: Arrays) -> list[str]:
    """Return observations that are impossible in any run."""
    arrival, first, end = (np.asarray(arrays[name]) for name in ("arrival_us", "first_token_us", "end_us"))
    is_answered = end >= 0
    read = sum(
        np.asarray(arrays[f"{name}_tokens"])
        for name in ("reused_gpu", "swapped_in", "recomputed", "prefilled")
    )
    sent = np.asarray(arrays["history_tokens"]) + np.asarray(arrays["prompt_tokens"])
    wrong = {
        "a token before the request": ((first < arrival) | (end < first)) & is_answered,
        "an answer without tokens": (np.asarray(arrays["output_tokens"]) < 1) & is_answered,
        "an end after the end of the run": end > arrays["run_end_us"],
        "more or fewer tokens read than sent": (read != sent) & is_answered,
    }
    return [f"{np.count_nonzero(rows)} requests have {what}" for what, rows in wrong.items() if rows.any()]


def _uncounted(point: Mapping[str, Any], arrays: Arrays, window_s: tuple[float, float]) -> list[str]:
    """Return the errors of counts that requests bound but do not determine."""
    errors = []
    refused = point.get("num_refused")
    if type(refused) is not int or refused < 0:
        errors.append(f"num_refused is {refused}; it must be a number from 0 on")
    start_us, end_us = (_whole_us(edge_s) for edge_s in window_s)
    arrival, end = np.asarray(arrays["arrival_us"]), np.asarray(arrays["end_us"])
    is_within = (arrival >= start_us) & (end >= 0) & (end < end_us)
    suspended = np.count_nonzero(is_within & (np.asarray(arrays["wasted_tokens"]) > 0))
    counted = point.get("num_suspensions")
    if suspended and (counted is None or counted < suspended):
        errors.append(f"num_suspensions is {counted}; its requests give at least {suspended}")
    elif counted is not None and (type(counted) is not int or counted < 0):
        errors.append(f"num_suspensions is {counted}; it must be a number from 0 on, or null")
    return errors


def _tokens(arrived: Sequence[Mapping[str, int]]) -> dict[str, float | int]:
    returning = [row for row in arrived if row["history_tokens"]]

    def total(rows: Iterable[Mapping[str, int]], name: str) -> int:
        return sum(row[f"{name}_tokens"] for row in rows)

    history = sum(total(returning, name) for name in ("reused_gpu", "swapped_in", "recomputed"))
    return {
        "gpu_hit_rate": total(returning, "reused_gpu") / max(history, 1),
        "cpu_hit_rate": total(returning, "swapped_in") / max(history, 1),
        "history_tokens": history,
        **{f"{n}_tokens": total(arrived, n) for n in ("recomputed", "wasted", "prefilled", "output")},
    }


def _per_token_s(rows: Iterable[Mapping[str, int]]) -> list[float]:
    return [_US * (row["end_us"] - row["arrival_us"]) / row["output_tokens"] for row in rows]


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": math.fsum(values) / len(values), **_percentiles(values, tuple(_PERCENTILES))}


def _percentiles(values: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Return percentiles with linear interpolation between neighbours."""
    ordered = sorted(values)
    found = {}
    for name in names:
        place = _PERCENTILES[name] * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        found[name] = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    return found


def _whole_us(seconds: float) -> float:
    return seconds if math.isinf(seconds) else round(1e6 * seconds)


def _is_equal(given: Any, value: Any, relative: float) -> bool:
    """Return whether counts are equal, and times equal up to rounding to microseconds."""
    if isinstance(value, dict):
        return (
            isinstance(given, dict)
            and given.keys() == value.keys()
            and all(_is_equal(given[name], part, relative) for name, part in value.items())
        )
    if value is None or isinstance(value, bool | int):
        return type(given) is type(value) and bool(given == value)
    return isinstance(given, int | float) and math.isclose(
        given, value, rel_tol=relative, abs_tol=_TIME_TOLERANCE_S
    )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in value.items()) + "}"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
