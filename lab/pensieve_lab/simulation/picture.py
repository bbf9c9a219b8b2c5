"""The picture of savings: prefilled tokens, latency per token, and where histories were found.

Owns: the picture. Does not know: how the figures were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve_lab.simulation.savings import SystemResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES_OF_PANEL, _INCHES_OF_SYSTEM, _INCHES_BESIDE = 3.9, 0.62, 1.6
_DOTS_PER_INCH = 110
_WIDE = 10  # ratio of largest to smallest value from which the axis is logarithmic
_LATENCIES = {"p50": "o", "p90": "s", "p99": "^"}
# Tone and hatch tell the parts apart without colour.
_HISTORY = (
    ("on the device", "#20638f", ""),
    ("on the host", "#8fbfdc", "///"),
    ("computed again", "#e8e8e8", "..."),
)


def draw_savings(served: Sequence[SystemResult], title: str, path: Path) -> None:
    """Draw three panels with a row per system; raises OSError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = _INCHES_BESIDE + _INCHES_OF_SYSTEM * len(served)
    figure = Figure(figsize=(3 * _INCHES_OF_PANEL, height), layout="constrained")
    FigureCanvasAgg(figure)
    prefilled, latency, history = figure.subplots(1, 3, sharey=True)
    rows = range(len(served))

    millions = [one.computed_tokens / 1e6 for one in served]
    bars = prefilled.barh(rows, millions, color="#20638f")
    shown = [f"{value:.3g}  (-{1 - value / millions[0]:.0%})" for value in millions[1:]]
    prefilled.bar_label(bars, [f"{millions[0]:.3g}", *shown], padding=3, fontsize=9)
    prefilled.set_xlim(0, 1.35 * max(millions))
    prefilled.set_xlabel("million tokens prefilled")
    prefilled.set_yticks(rows, [one.label for one in served], fontsize=9)
    prefilled.invert_yaxis()

    for part, marker in _LATENCIES.items():
        values = [1e3 * one.figures["normalized_latency_s"][part] for one in served]
        latency.plot(values, rows, marker, color="black", fillstyle="none" if part == "p90" else "full",
                     label=part)  # fmt: skip
    _scale(
        latency, [1e3 * one.figures["normalized_latency_s"][part] for one in served for part in _LATENCIES]
    )

    left = [0.0] * len(served)
    for (name, color, hatch), shares in zip(_HISTORY, zip(*map(_history, served), strict=True), strict=True):
        history.barh(rows, shares, left=left, label=name, color=color, hatch=hatch, edgecolor="white")
        left = [a + b for a, b in zip(left, shares, strict=True)]
    history.set_xlim(0, 1)
    history.set_xlabel("share of history tokens")
    for axes in (latency, history):
        axes.grid(axis="x", alpha=0.3)
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=8,
            handletextpad=0.4, columnspacing=1.0, handlelength=1.5,
        )  # fmt: skip
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _scale(latency: Axes, values_ms: Sequence[float]) -> None:
    """Start the axis at 0, or use a logarithmic axis if the smallest values would overlap."""
    from matplotlib.ticker import LogLocator

    label = "ms/token, arrival to last token"
    if max(values_ms) < _WIDE * min(values_ms):
        latency.set_xlim(0, 1.1 * max(values_ms))
        latency.set_xlabel(label)
        return
    latency.set_xscale("log")
    latency.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    latency.xaxis.set_major_formatter("{x:g}")
    latency.xaxis.set_minor_formatter("")
    latency.set_xlabel(f"{label} (log)")


def _history(one: SystemResult) -> tuple[float, float, float]:
    on_gpu, on_cpu = one.hit_rates
    return on_gpu, on_cpu, max(1 - on_gpu - on_cpu, 0.0)
