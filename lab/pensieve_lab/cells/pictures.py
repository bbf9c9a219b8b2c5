"""Pictures that show which request has a cell in which task.

Owns: the drawing.
Does not know: where the tasks come from.
Called by `programs.demo_cells`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_COLOURS = {" ": (1.0, 1.0, 1.0), ".": (0.9, 0.9, 0.9), "e": (0.35, 0.55, 0.8), "d": (0.9, 0.55, 0.25)}
_INCHES_A_TASK, _INCHES_A_REQUEST = 0.18, 0.2


def draw_tasks(pictures: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw pictures by title, with a line per request and a letter per task; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_tasks = max(len(line) for lines in pictures.values() for line in lines)
    num_lines = sum(map(len, pictures.values()))
    size = (2 + num_tasks * _INCHES_A_TASK, len(pictures) + num_lines * _INCHES_A_REQUEST)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, lines) in zip(figure.subplots(len(pictures), 1), pictures.items(), strict=True):
        pixels = np.array([[_COLOURS[one] for one in line.ljust(num_tasks)] for line in lines])
        axes.imshow(pixels, aspect="auto", extent=(0, num_tasks, len(lines) + 0.5, 0.5))
        axes.set_title(f"{title}: encoder blue, decoder orange, waiting grey", fontsize=9)
        axes.set_xlabel("task")
        axes.set_ylabel("request")
    figure.savefig(path, dpi=100)
