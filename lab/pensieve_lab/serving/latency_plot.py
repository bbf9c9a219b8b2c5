"""Draws latency over throughput, a curve per system (the paper's Figure 10).

Owns: the picture, its colours and markers, and the note on what is cut off. Does not know: where the figures
come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
"""Okabe and Ito's colours, which people with any kind of colour vision tell apart."""
_MARKERS = ("o", "s", "^", "v", "D", "P", "X")  # a second way to tell the curves apart


class Latency(NamedTuple):
    """Latency that can be drawn.

    Attributes:
      field: name in a load point, in seconds.
      label: label of the axis, with its unit.
      is_log: whether the axis is logarithmic, because values differ by orders of magnitude.
    """

    field: str
    label: str
    is_log: bool = False


LATENCIES = {
    "token": Latency("normalized_latency_s", "milliseconds per output token"),
    "first_token": Latency("first_token_s", "milliseconds to the first token", is_log=True),
}
"""Latencies by the name of `--latency`."""


class Point(NamedTuple):
    """Load point: requests answered per second, and the drawn latency in seconds."""

    requests_per_s: float
    mean_s: float
    p90_s: float


class View(NamedTuple):
    """View of the curves.

    Attributes:
      level_s: latency of a horizontal line; None draws none.
      top_s: highest latency drawn; None means ten times the lowest, limited to the data.
      latency: the latency of the points.
    """

    level_s: float | None = None
    top_s: float | None = None
    latency: Latency = LATENCIES["token"]


def plot_latency(curves: Mapping[str, Sequence[Point]], title: str, path: Path, view: View) -> None:
    """Draw mean and 90th percentile of a latency per named curve; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    top_ms = _top_ms(curves, view)
    for index, (name, points) in enumerate(curves.items()):
        throughput = [point.requests_per_s for point in points]
        color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
        means, tail = ([1e3 * getattr(point, part) for point in points] for part in ("mean_s", "p90_s"))
        axes.plot(throughput, means, marker=marker, color=color, label=name, markersize=5)
        axes.plot(throughput, tail, ":", color=color, linewidth=1)
    if view.level_s is not None:
        axes.axhline(1e3 * view.level_s, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xlabel("requests answered per second")
    axes.set_ylabel(f"{view.latency.label}\nmean (dotted: 90th percentile)")
    if view.latency.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(top=top_ms)
    else:
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
    highest = [1e3 * max(max(point[1:]) for point in points) for points in curves.values() if points]
    if view.latency.is_log:
        return 1.1 * max(highest, default=1.0)
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
