"""Picture of the effect of planted outliers on each format.

Owns: the drawing.
Does not know: how the figures were found.
Called by the program of the sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pensieve_lab.kv_quality.outliers import COMPARED, PARTS

_INCHES, _DOTS_PER_INCH = (8.4, 3.4), 100
_TITLES = {"keys": "a pair of channels of K times", "values": "a channel of V times"}
_LABELS = {
    "float8_e4m3fn_unscaled": "e4m3, no scales",
    "float8_e4m3fn": "e4m3, a scale per row",
    "int8": "int8, a scale per row",
    "int8_balanced": "int8, channels balanced",
}


def draw(points: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw divergence over the factor in panels for K and V, with bars over seeds; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PARTS), sharey=True)
    for axes, part in zip(panels, PARTS, strict=True):
        some = [point for point in points if point["part"] == part]
        scales = [point["scale"] for point in some]
        for index, name in enumerate(COMPARED):
            # Rounding may put the mean of equal numbers outside their range.
            means, lows, highs = zip(*(point[name] for point in some), strict=True)
            below = [max(0.0, mean - low) for mean, low in zip(means, lows, strict=True)]
            above = [max(0.0, high - mean) for mean, high in zip(means, highs, strict=True)]
            axes.errorbar(
                scales,
                means,
                (below, above),
                fmt="o-",
                color=f"C{index}",
                label=_LABELS.get(name, name),
                capsize=2,
                markersize=4,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
        axes.set_yscale("log")
        axes.set_xlabel(_TITLES[part])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("KL from float32, nats a token")
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right center"
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
