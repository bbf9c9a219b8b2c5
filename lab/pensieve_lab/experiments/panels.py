"""Plots of experiments: panels of curves side by side.

Owns: the drawing.
Does not know: what a plot shows.
Called by the experiments, the balance study and programs.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

type Curve = Sequence[tuple[float, float]]

_PANEL_INCHES = (5.2, 4.4)
_DOTS_PER_INCH = 100
_MARKERS = "os^Dv*P"  # so that curves can be told apart without colour
# where curves meet, earlier markers surround the later ones
_MARKER_SIZES = (7.5, 7.0, 6.5, 6.0, 5.5, 5.0, 4.5)
_MAX_IN_A_ROW = 3
_CHARACTERS_PER_INCH = 12  # of titles, in their font
_UNDER_AXES, _UNDER_TURNED = -0.16, -0.27  # where a legend begins, in heights of the axes: under the labels
_FROM_ZERO = 0.4  # x begins at 0 if the smallest x is below this share of the largest
_ROOM_FOR_LEVEL = 0.06  # share of the axes: with less room above its line, a level's number stands below it
_CHARACTERS_OF_HALF = 26  # in a legend's half width, in its font
_CHARACTERS_OF_TICKS = 48  # side by side; with more, the ticks are rotated


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Axes and what is drawn in them.

    Attributes:
      title, x_label, y_label: texts, with units.
      curves: points by name, in the order in which a line joins them.
      seeds: curves of single seeds, drawn thin behind their mean.
      dashed: names of curves from other sources, such as the paper.
      coloured_as: maps a curve's name to an earlier one whose colour it shares.
      level: a horizontal line at which curves are read.
      x_from_zero: start x at 0, wherever points lie.
      y_min: smaller values are not shown.
      y_max: larger values are cut off, and the picture states the number of such points.
      log_x, log_y: logarithmic axes, base two and ten.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Curve]
    seeds: Mapping[str, Sequence[Curve]] = field(default_factory=dict)
    dashed: frozenset[str] = frozenset()
    coloured_as: Mapping[str, str] = field(default_factory=dict)
    level: float | None = None
    x_from_zero: bool = False
    y_min: float = 0.0
    y_max: float | None = None
    log_x: bool = False
    log_y: bool = False

    @property
    def num_cut_off(self) -> int:
        """Number of points of curves above `y_max`."""
        limit = math.inf if self.y_max is None else self.y_max
        return sum(y > limit for curve in self.curves.values() for _, y in curve)


def draw_panels(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw up to three panels in a row, more in a square; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    count = len(panels)
    num_columns = count if count <= _MAX_IN_A_ROW else math.ceil(math.sqrt(count))
    num_rows = math.ceil(count / num_columns)
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    free, names = places[count:], {tuple(panel.curves) for panel in panels}
    shares_legend = count > _MAX_IN_A_ROW and len(names) == 1
    for axes, panel in zip(places, panels, strict=False):
        is_said = count == 1 and title.startswith(panel.title)
        _draw(axes, panel, with_title=not is_said, with_legend=not shares_legend)
    for axes in free:
        axes.set_axis_off()
    if shares_legend:
        handles, labels = places[0].get_legend_handles_labels()
        if free:
            free[0].legend(handles, labels, loc="center", fontsize=11, frameon=False)
        else:
            figure.legend(handles, labels, loc="outside lower center", ncols=_MAX_IN_A_ROW, frameon=False)
    figure.suptitle(_wrapped(title, width * num_columns), fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw(axes: Axes, panel: Panel, *, with_title: bool, with_legend: bool) -> None:
    markers = itertools.cycle(zip(_MARKERS, _MARKER_SIZES, strict=True))
    colours: dict[str, Any] = {}
    for (name, curve), (marker, size) in zip(panel.curves.items(), markers, strict=False):
        style = "x--" if name in panel.dashed else f"{marker}-"
        [line] = axes.plot(
            [x for x, _ in curve], [y for _, y in curve], style, label=name, markersize=size, linewidth=1.4,
            color=colours.get(panel.coloured_as.get(name, "")),
        )  # fmt: skip
        colours[name] = line.get_color()
        for one in panel.seeds.get(name, ()):
            axes.plot(
                [x for x, _ in one], [y for _, y in one], color=line.get_color(), alpha=0.3, linewidth=0.7
            )
    if panel.level is not None:
        axes.axhline(panel.level, color="gray", linewidth=0.8, linestyle=":")
    is_turned = _scale(axes, panel)
    if panel.level is not None:
        _write_level(axes, panel.level)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if with_title:
        axes.set_title(_wrapped(panel.title, _PANEL_INCHES[0]), fontsize=9)
    axes.grid(alpha=0.3)
    heading = f"points cut off above {panel.y_max:g}: {panel.num_cut_off}" if panel.num_cut_off else None
    if with_legend or heading:
        handles, labels = axes.get_legend_handles_labels() if with_legend else ([], [])
        # Under the axes, because inside them it would hide a curve if curves cover all of the area.
        axes.legend(
            handles, labels, fontsize=8, title=heading, title_fontsize=8, frameon=False,
            ncols=2 if max(map(len, labels), default=0) <= _CHARACTERS_OF_HALF else 1,
            loc="upper center", bbox_to_anchor=(0.5, _UNDER_TURNED if is_turned else _UNDER_AXES),
        )  # fmt: skip


def _write_level(axes: Axes, level: float) -> None:
    place = axes.get_yaxis_transform()  # x in shares of the axes
    _, height = axes.transAxes.inverted().transform(axes.transData.transform((1.0, level)))
    side = "bottom" if height < 1 - _ROOM_FOR_LEVEL else "top"
    axes.text(0.01, level, f"{level:g}", color="gray", fontsize=8, va=side, transform=place)


def _scale(axes: Axes, panel: Panel) -> bool:
    """Set the axes' scales; return whether the ticks of x are rotated."""
    is_wide = False
    xs = sorted({x for curve in panel.curves.values() for x, _ in curve})
    if panel.log_x:
        names = [f"{x:,.0f}" for x in xs]
        is_wide = sum(map(len, names)) > _CHARACTERS_OF_TICKS
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, names, rotation=30 if is_wide else 0, fontsize=8)
        axes.minorticks_off()
        if len(xs) == 1:  # centred; by default the axis would show a power of two or more around it
            axes.set_xlim(xs[0] / 2, xs[0] * 2)
    elif xs and (panel.x_from_zero or xs[0] < _FROM_ZERO * xs[-1]):
        axes.set_xlim(left=0)
    if panel.log_y:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_ylim(panel.y_min, panel.y_max)
    return is_wide


def _wrapped(title: str, inches: float) -> str:
    """Return the title in lines that fit into a width."""
    return "\n".join(textwrap.wrap(title, int(inches * _CHARACTERS_PER_INCH)))
