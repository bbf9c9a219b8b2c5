"""Figures 6 to 8 of the Baton paper: progress of runs over time.

Owns: the picture. Does not know: what ran, or how it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_QUANTITIES = (
    ("completed", "figure 6: queries completed", 1.0),
    ("output_tokens", "figure 7: output tokens", 1.0),
    ("allocated_bytes", "figure 8: MB of KV cache, allocated", 1e-6),
    ("spanned_bytes", "figure 8: MB of KV cache, spanned", 1e-6),
)
_INCHES, _DOTS_PER_INCH = (4.2, 3.0), 100


def draw_over_time(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw a row of panels per quantity, a panel per batch size, and a curve per method.

    Raises OSError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(row["batch"] for row in rows))
    width, height = _INCHES
    figure = Figure(figsize=(width * len(batches), height * len(_QUANTITIES)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(_QUANTITIES), len(batches), squeeze=False)
    for line, (key, label, factor) in zip(panels, _QUANTITIES, strict=True):
        for axes, batch in zip(line, batches, strict=True):
            for row in rows:
                if row["batch"] == batch:
                    series = row["series"]
                    values = [factor * value for value in series[key]]
                    # Values hold until the next step.
                    axes.step(series["time_s"], values, where="post", label=row["method"], linewidth=1.1)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.set_title(f"{batch} rows", fontsize=9)
        line[0].set_ylabel(label)
    for axes in panels[-1]:
        axes.set_xlabel("seconds")
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
