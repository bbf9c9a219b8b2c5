"""Plots of experiments: panels of curves side by side.

Owns: the picture. Does not know: what it shows.
Called by: experiments, which make panels, and `scripts/reproduce.py`, which has them drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

type Curve = Sequence[tuple[float, float]]

_PANEL_INCHES = (5.2, 3.9)
_DOTS_PER_INCH = 100


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Axes and what is drawn in them.

    Attributes:
      title, x_label, y_label: in words, with units.
      curves: points by name, in the order in which a line joins them.
      dashed: names of curves that belong to what others say, the paper's for example.
      level: a horizontal line to read curves at.
      y_max: what lies above is cut off.
      log_x: powers of two.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Curve]
    dashed: frozenset[str] = frozenset()
    level: float | None = None
    y_max: float | None = None
    log_x: bool = False


def draw_panels(panels: Sequence[Panel], title: str, path: Path) -> None:
    """One row of them; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw(axes: Axes, panel: Panel) -> None:
    for name, curve in panel.curves.items():
        style = "x--" if name in panel.dashed else "o-"
        axes.plot(
            [x for x, _ in curve], [y for _, y in curve], style, label=name, markersize=4, linewidth=1.2
        )
    if panel.level is not None:
        axes.axhline(panel.level, color="gray", linewidth=0.8, linestyle=":")
    if panel.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for curve in panel.curves.values() for x, _ in curve})
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], rotation=30, fontsize=8)
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, panel.y_max)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
