"""How far a simulated load point may be from the measured one.

Owns: the figures that are compared, the limits, and when a load point is over the knee.
Does not know: where either side comes from.

Over the knee latencies grow for as long as a run lasts, so throughput counts there, and latency elsewhere.
Users wait for answers and so slow down with the server. If everything that is sent is served in the end, a
mean wait of a second for the first token shows that the point is over the knee.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAX_STEP_DIFFERENCE = 0.10
MAX_THROUGHPUT_DIFFERENCE = 0.10
MAX_LATENCY_DIFFERENCE = 0.10
MAX_HIT_RATE_DIFFERENCE = 0.03
_KNEE_SHARE = 0.95  # of what was sent; requests at the window's edges make less difference than that
_KNEE_WAIT_S = 1.0  # mean time to first token
_MIN_STEP_SHARE = 0.01  # of the time in steps; buckets with less are only shown
_RELATIVE, _POINTS = "relative", "points"
_SPREADS = {"ms/token": "normalized_latency_s", "ttft ms": "first_token_s", "tpot ms": "output_token_s"}
_PARTS = ("mean", "p50", "p90", "p99")
_HIT_RATES = {"gpu hits": "gpu_hit_rate", "cpu hits": "cpu_hit_rate"}
_COUNTS = {
    "recomputed tokens": "recomputed_tokens",
    "suspensions": "num_suspensions",
    "steps": "num_steps",
    "tokens/step": "tokens_per_step",
    "GB out": "swapped_out_bytes",
    "GB in": "swapped_in_bytes",
}

Figures = Mapping[str, Any]


class Criterion(NamedTuple):
    """Comparison of one figure of a load point.

    Attributes:
      figure: name of the figure.
      measured, simulated: values; None if there was nothing to measure.
      difference: simulated minus measured, relative to the measured value except for hit rates.
      limit: largest difference that passes; None if the figure is only shown.
    """

    figure: str
    measured: float | None
    simulated: float | None
    difference: float | None
    limit: float | None

    @property
    def verdict(self) -> str:
        """Pass, miss, or a dash for a figure that is only shown."""
        if self.limit is None:
            return "-"
        return "pass" if self.difference is not None and abs(self.difference) <= self.limit else "MISS"


def is_over_the_knee(measured: Figures) -> bool:
    """Return whether clearly less was served than sent, or turns wait long for their first token."""
    sent, first = measured["sent_requests_per_s"], measured["first_token_s"]
    is_late = first is not None and first["mean"] > _KNEE_WAIT_S
    return bool(sent) and (is_late or measured["requests_per_s"] < _KNEE_SHARE * sent)


def criteria(measured: Figures, simulated: Figures) -> list[Criterion]:
    """Compare a load point: first the figures that decide, then those that help to explain."""
    over = is_over_the_knee(measured)
    found = [
        _compare(
            "requests/s",
            measured["requests_per_s"],
            simulated["requests_per_s"],
            MAX_THROUGHPUT_DIFFERENCE if over else None,
        )
    ]
    for name, key in _SPREADS.items():
        for part in _PARTS:
            limit = MAX_LATENCY_DIFFERENCE if (name, part) == ("ms/token", "mean") and not over else None
            times = _ms(measured, key, part), _ms(simulated, key, part)
            found.append(_compare(f"{name} {part}", *times, limit))
    for name, key in _HIT_RATES.items():
        found.append(_compare(name, measured[key], simulated[key], MAX_HIT_RATE_DIFFERENCE, _POINTS))
    found += _step_criteria(measured["steps"], simulated["steps"])
    host_s = measured.get("host_step_s"), simulated.get("host_step_s")
    found.append(_compare("host ms/step", _scaled(host_s[0], 1e3), _scaled(host_s[1], 1e3), None))
    for name, key in _COUNTS.items():
        factor = 1e-9 if name.startswith("GB") else 1.0
        found.append(_compare(name, _scaled(measured[key], factor), _scaled(simulated[key], factor), None))
    return found


def missed(points: Sequence[Sequence[Criterion]]) -> int:
    """Count the missed criteria."""
    return sum(one.verdict == "MISS" for point in points for one in point)


def _step_criteria(measured: Mapping[str, Figures], simulated: Mapping[str, Figures]) -> Iterator[Criterion]:
    """Compare step times and contents bucket by bucket."""
    seconds = sum(one["num_steps"] * one["mean_s"] for one in measured.values())
    for bucket, one in measured.items():
        other: Figures = simulated.get(bucket, {})
        counts = one["num_steps"] * one["mean_s"] >= _MIN_STEP_SHARE * seconds
        times = _scaled(one["mean_s"], 1e3), _scaled(other.get("mean_s"), 1e3)
        yield _compare(f"ms/step of {bucket}", *times, MAX_STEP_DIFFERENCE if counts else None)
        yield _compare(f"steps of {bucket}", one["num_steps"], other.get("num_steps"), None)
        yield _compare(f"tokens/step of {bucket}", one["mean_tokens"], other.get("mean_tokens"), None)


def _compare(
    figure: str, measured: float | None, simulated: float | None, limit: float | None, kind: str = _RELATIVE
) -> Criterion:
    difference = None
    if measured is not None and simulated is not None:
        difference = simulated - measured
        if kind == _RELATIVE:
            difference = difference / measured if measured else None
    return Criterion(figure, measured, simulated, difference, limit)


def _ms(figures: Figures, key: str, part: str) -> float | None:
    return None if figures[key] is None else _scaled(figures[key].get(part), 1e3)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
