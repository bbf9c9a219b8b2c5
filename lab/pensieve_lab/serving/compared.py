"""Draws systems side by side: median and tail latencies over the load.

Owns: the picture and its limits. Does not know: where the figures come from, or files of documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pensieve_jax import ConfigError


class _Panel(NamedTuple):
    """Panel of one figure; with `is_at_least`, unanswered requests count with the time they had waited."""

    name: str
    part: str
    label: str
    is_at_least: bool


_PANELS = (
    _Panel("latency_s", "p50", "latency, median, s", True),
    _Panel("latency_s", "p99", "latency, 99th percentile, s", True),
    _Panel("first_token_s", "p99", "first token of answered requests,\n99th percentile, s", False),
)
_INCHES, _DOTS_PER_INCH = (4.2, 3.6), 100
_LEGEND_COLUMNS, _LEGEND_INCHES = 5, 0.2  # legend below all panels, and the height of its rows
_LINES = ("-", "--", ":", "-.")  # one per kind of arrivals
_NUM_COLORS = 10  # one per system
_HOLLOW = "hollow: lower bound, not all requests were answered"


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw a panel per figure and a curve per system and kind of arrivals; bars span the seeds.

    A point is hollow if unanswered requests make its value a lower bound. Raises ConfigError for rows that
    have no rate or cannot be told apart, and if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    systems = list(dict.fromkeys(row["system"] for row in rows))
    kinds = list(dict.fromkeys(row["arrivals"] for row in rows))
    _check(rows, systems, kinds, path)
    curves: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        curves.setdefault((row["system"], row["arrivals"]), []).append(row)
    width, height = _INCHES
    height += _LEGEND_INCHES * -(-len(curves) // _LEGEND_COLUMNS)
    figure = Figure(figsize=(width * len(_PANELS), height), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(_PANELS), squeeze=False)[0], _PANELS, strict=True):
        for (system, kind), of_curve in curves.items():
            label = f"{system}{f', {kind}' if kind else ''}"
            color, line = f"C{systems.index(system)}", _LINES[kinds.index(kind)]
            _draw_curve(axes, panel, of_curve, line, color, label)
        axes.set_yscale("log")
        axes.set_xlabel("conversations per second")
        axes.set_ylabel(panel.label)
        axes.grid(alpha=0.3)
    named = figure.axes[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=8, frameon=False)
    is_hollow = any(row["num_unfinished"] for row in rows)
    figure.suptitle(f"{title}\n{_HOLLOW}" if is_hollow else title, fontsize=10)
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        limit = "a file that can be written"
        raise ConfigError("--plot", str(path), limit, error.strerror or str(error)) from error


def _draw_curve(
    axes: Any, panel: _Panel, rows: Sequence[Mapping[str, Any]], line: str, color: str, label: str
) -> None:
    known = [row for row in rows if row[panel.name]]
    found = [row[panel.name][panel.part] for row in known]
    rates, values = [row["rate"] for row in known], [one["median"] for one in found]
    bars = (
        [one["median"] - one["min"] for one in found],
        [one["max"] - one["median"] for one in found],
    )
    axes.errorbar(rates, values, bars, fmt=line, color=color, label=label, capsize=2)
    for rate, value, row in zip(rates, values, known, strict=True):
        face = "white" if panel.is_at_least and row["num_unfinished"] else color
        axes.plot(rate, value, "o", color=color, markerfacecolor=face, markersize=5)


def _check(
    rows: Sequence[Mapping[str, Any]], systems: Sequence[str], kinds: Sequence[str | None], path: Path
) -> None:
    if any(row["rate"] is None for row in rows):
        limit = "left out for recorded or simultaneous arrivals, which have no rate to draw over"
        raise ConfigError("--plot", str(path), limit)
    for what, names, most in (("kinds of arrivals", kinds, len(_LINES)), ("systems", systems, _NUM_COLORS)):
        if len(names) > most:
            limit = f"a picture of at most {most} {what}, so that they can be told apart"
            raise ConfigError("--plot", str(path), limit, f"found {len(names)}; give it fewer --documents")
