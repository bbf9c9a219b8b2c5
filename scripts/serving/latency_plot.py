"""Draws latency over throughput, a curve for each system (the paper's Figure 10).

Owns: the picture. Does not know: where figures come from. Called by: `report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """One load: requests answered in a second, and seconds per output token."""

    requests_per_s: float
    mean_s: float
    p90_s: float


def plot_latency(curves: Mapping[str, Sequence[Point]], title: str, path: Path) -> None:
    """Means and 90th percentiles of the normalized latency, by system; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in curves.items():
        throughput = [point.requests_per_s for point in points]
        (line,) = axes.plot(throughput, [1e3 * p.mean_s for p in points], "o-", label=name, markersize=4)
        tail = [1e3 * point.p90_s for point in points]
        axes.plot(throughput, tail, ":", color=line.get_color(), linewidth=1)
    axes.set_xlabel("requests answered a second")
    axes.set_ylabel("milliseconds per output token (dotted: 90th percentile)")
    # Over the knee latencies grow with the run: what matters is where they begin to. So ten times the lowest
    # latency is seen, the lowest of every system in any case, and no more than there is.
    lowest = [1e3 * min(point.mean_s for point in points) for points in curves.values() if points]
    highest = [1e3 * max(point.p90_s for point in points) for points in curves.values() if points]
    top = max(10 * min(lowest, default=1.0), 1.2 * max(lowest, default=1.0))
    axes.set_ylim(0, min(top, 1.1 * max(highest, default=1.0)))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)
