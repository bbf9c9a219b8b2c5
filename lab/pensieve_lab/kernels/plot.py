"""Roofline plot: achieved FLOP/s of kernels over their arithmetic intensity.

Owns: the drawing.
Does not know: how anything was measured.
Called by `programs.benchmark_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve_lab.kernels.table import Result
from pensieve_lab.steps.ceilings import Ceilings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM_FOR_NAMES = 20
_MARKERS = "osD^v<>P*Xph8"


def plot_roofline(results: Sequence[Result], ceilings: Ceilings, title: str, path: Path) -> None:
    """Draw a mark for every timed case and kernel with default settings; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [result for result in results if result.timing is not None and not result.is_tried]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    for i, name in enumerate(dict.fromkeys(result.name for result in timed)):
        of_kernel = [result for result in timed if result.name == name]
        axes.plot(
            [_intensity(result) for result in of_kernel],
            [_tflop_per_s(result) for result in of_kernel],
            _MARKERS[i % len(_MARKERS)],
            label=name,
            markersize=7 if of_kernel[0].is_peer else 9,
            fillstyle="none" if of_kernel[0].is_peer else "full",
        )
    _draw_ceilings(axes, ceilings, [_intensity(result) for result in timed] or [1.0])
    _name_cases(axes, timed)
    axes.set_ylim(bottom=axes.get_ylim()[0] / _ROOM_FOR_NAMES)
    axes.set_xlabel("FLOP per byte that must be read or written")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _intensity(result: Result) -> float:
    return result.work.flop / result.work.num_bytes


def _tflop_per_s(result: Result) -> float:
    return 1e-12 * result.work.flop / result.seconds


def _draw_ceilings(axes: Axes, ceilings: Ceilings, intensities: Sequence[float]) -> None:
    """Draw the memory slope up to the ridge, and the compute peak from there."""
    peak, bandwidth = ceilings.flop_per_s, ceilings.read_bytes_per_s
    ridge = peak / bandwidth
    begin, end = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    axes.plot([begin, ridge], [1e-12 * begin * bandwidth, 1e-12 * peak], "k-", linewidth=1)
    axes.plot([ridge, end], [1e-12 * peak, 1e-12 * peak], "k-", linewidth=1)
    axes.annotate(
        f"reading {1e-12 * bandwidth:.3g} TB/s; products {1e-12 * peak:.3g} TFLOP/s",
        (ridge, 1e-12 * peak), xytext=(0, 6), textcoords="offset points", ha="center",
    )  # fmt: skip


def _name_cases(axes: Axes, timed: Sequence[Result]) -> None:
    """Write upright names under the slowest mark of each case; cases of similar intensity share a column."""
    columns: dict[int, list[Result]] = {}
    for result in timed:
        columns.setdefault(round(20 * math.log10(_intensity(result))), []).append(result)
    for of_column in columns.values():
        names = dict.fromkeys(result.work.name for result in of_column)
        lowest = min(_tflop_per_s(result) for result in of_column)
        axes.annotate(
            "\n".join(names),
            (_intensity(of_column[0]), lowest),
            xytext=(0, -8), textcoords="offset points", rotation=90, ha="center", va="top", fontsize=7,
        )  # fmt: skip
