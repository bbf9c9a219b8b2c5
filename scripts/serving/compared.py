"""Draws systems side by side: median and tail of latencies over the load.

Owns: the picture. Does not know: where figures come from, or files of documents.
Called by: compare_serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PANELS = (
    ("latency_s", "p50", "latency, median, s"),
    ("latency_s", "p99", "latency, 99th percentile, s"),
    ("first_token_s", "p99", "first token, 99th percentile, s"),
)
_INCHES, _DOTS_PER_INCH = (4.2, 3.4), 100


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """A panel for each figure, a curve for each system and kind of arrivals; bars are the seeds' extremes.

    What was not answered makes a point hollow: it is at least so high. Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _INCHES
    figure = Figure(figsize=(width * len(_PANELS), height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_PANELS), squeeze=False)[0]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    kinds = list(dict.fromkeys(row["arrivals"] for row in rows))
    for axes, (name, part, label) in zip(panels, _PANELS, strict=True):
        for kind, line in zip(kinds, ("-", "--", ":", "-."), strict=False):
            for index, system in enumerate(systems):
                points = [
                    row for row in rows if (row["system"], row["arrivals"]) == (system, kind) and row[name]
                ]
                found = [row[name][part] for row in points]
                rates = [row["rate"] or 0.0 for row in points]
                values = [one["median"] for one in found]
                below = [one["median"] - one["min"] for one in found]
                above = [one["max"] - one["median"] for one in found]
                text = f"{system}{f', {kind}' if kind else ''}"
                axes.errorbar(
                    rates, values, (below, above), fmt=line, color=f"C{index}", label=text, capsize=2
                )
                for rate, value, row in zip(rates, values, points, strict=True):
                    face = "white" if row["num_unfinished"] else f"C{index}"
                    axes.plot(rate, value, "o", color=f"C{index}", markerfacecolor=face, markersize=5)
        axes.set_yscale("log")
        axes.set_xlabel("requests that come in a second")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
