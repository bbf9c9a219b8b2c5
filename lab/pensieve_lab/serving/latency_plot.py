"""Draws latency over throughput, a curve per system (the paper's Figure 10).

Owns: the picture, and the note on what is cut off. Does not know: where the figures come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """Load point: requests answered per second, and seconds per output token."""

    requests_per_s: float
    mean_s: float
    p90_s: float


class View(NamedTuple):
    """View of the curves.

    Attributes:
      level_s: latency of a horizontal line; None draws none.
      top_s: highest latency drawn; None means ten times the lowest, limited to the data.
    """

    level_s: float | None = None
    top_s: float | None = None


def plot_latency(curves: Mapping[str, Sequence[Point]], title: str, path: Path, view: View) -> None:
    """Draw mean and 90th percentile of the normalized latency per named curve; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    top_ms = _top_ms(curves, view)
    for name, points in curves.items():
        throughput = [point.requests_per_s for point in points]
        (line,) = axes.plot(throughput, [1e3 * p.mean_s for p in points], "o-", label=name, markersize=4)
        tail = [1e3 * point.p90_s for point in points]
        axes.plot(throughput, tail, ":", color=line.get_color(), linewidth=1)
    if view.level_s is not None:
        axes.axhline(1e3 * view.level_s, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xlabel("requests answered per second")
    axes.set_ylabel("milliseconds per output token\nmean (dotted: 90th percentile)")
    axes.set_ylim(0, top_ms)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left", title=_cut_off(curves, top_ms), alignment="left")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _top_ms(curves: Mapping[str, Sequence[Point]], view: View) -> float:
    """Return the upper end of the axis.

    Over the knee latencies grow with the length of the run, so only where they begin to grow matters. The
    axis shows ten times the lowest latency, at least the lowest of every curve, and no more than the data.
    """
    if view.top_s is not None:
        return 1e3 * view.top_s
    lowest = [1e3 * min(point.mean_s for point in points) for points in curves.values() if points]
    highest = [1e3 * max(point.p90_s for point in points) for points in curves.values() if points]
    top = max(10 * min(lowest, default=1.0), 1.2 * max(lowest, default=1.0))
    return min(top, 1.1 * max(highest, default=1.0))


def _cut_off(curves: Mapping[str, Sequence[Point]], top_ms: float) -> str | None:
    """Describe the points above the axis; None if there are none."""
    points = [point for curve in curves.values() for point in curve]
    num_means = sum(1e3 * point.mean_s > top_ms for point in points)
    num_tails = sum(1e3 * point.p90_s > top_ms for point in points)
    if not num_tails:
        return None
    return f"cut off above {top_ms:.0f} ms: means {num_means}, 90th percentiles {num_tails}"
