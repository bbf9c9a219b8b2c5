"""Plots of experiments: panels of curves side by side.

Owns: the picture. Does not know: what it shows.
Called by: experiments, which make panels, and `scripts/reproduce.py`, which has them drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

type Curve = Sequence[tuple[float, float]]

_PANEL_INCHES = (5.2, 3.9)
_DOTS_PER_INCH = 100
_MARKERS = "os^Dv*P"  # curves can be told apart without colour
_MAX_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Axes and what is drawn in them.

    Attributes:
      title, x_label, y_label: in words, with units.
      curves: points by name, in the order in which a line joins them.
      dashed: names of curves that belong to what others say, the paper's for example.
      level: a horizontal line to read curves at.
      y_min, y_max: what lies below or above is cut off.
      log_x: powers of two.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Curve]
    dashed: frozenset[str] = frozenset()
    level: float | None = None
    y_min: float = 0.0
    y_max: float | None = None
    log_x: bool = False


def draw_panels(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Up to three in a row, more in a square; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    count = len(panels)
    num_columns = count if count <= _MAX_IN_A_ROW else math.ceil(math.sqrt(count))
    num_rows = math.ceil(count / num_columns)
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for axes, panel in itertools.zip_longest(places, panels):
        if panel is None:
            axes.set_axis_off()
        else:
            _draw(axes, panel)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw(axes: Axes, panel: Panel) -> None:
    for (name, curve), marker in zip(panel.curves.items(), itertools.cycle(_MARKERS), strict=False):
        style = "x--" if name in panel.dashed else f"{marker}-"
        axes.plot(
            [x for x, _ in curve], [y for _, y in curve], style, label=name, markersize=5, linewidth=1.2
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
    axes.set_ylim(panel.y_min, panel.y_max)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
