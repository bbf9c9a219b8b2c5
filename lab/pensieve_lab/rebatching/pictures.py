"""What queries do in a padded batch, step by step: as text, and as a picture of the ring's columns.

Owns: what is noted of a step, and the drawing.
Does not know: methods, models, or what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pensieve_jax.rebatching.launches import Decode, Shape
from pensieve_jax.rebatching.metrics import StepSeen
from pensieve_jax.rebatching.query import KVLocation

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_EVERY = 10  # steps between two numbers of the line of spans
_FREE, _ENDED = (1.0, 1.0, 1.0), (0.8, 0.8, 0.8)
_INCHES, _PIXELS_AN_INCH = (5.5, 6.5), 100


class Step(NamedTuple):
    """One of the ring.

    Attributes:
      letters: for each row that of the query which got a token, small if its prompt was computed in the step.
      span, length: columns from the first that is needed, and columns in all.
      columns: for each row that is held, (row, query or -1 for one that has ended, places of its tokens).
    """

    letters: str
    span: int
    length: int
    columns: list[tuple[int, int, np.ndarray]]


class Album:
    """Steps of one engine, as its observer; queries are numbered in the order of their submission.

    Attributes:
      steps: so far.
    """

    def __init__(self) -> None:
        """Empty."""
        self.steps: list[Step] = []

    def observe(self, step: StepSeen) -> None:
        """See `metrics.StepSeen`."""
        ring = step.ring
        for launch in step.launches:
            if not isinstance(launch, Decode | Shape):
                continue
            assert ring.shape is not None
            letters = ["."] * ring.shape.batch
            for query, row in launch.samples:
                is_prompt = isinstance(launch, Shape) and query.serial == launch.serial
                letter = _LETTERS[query.serial - 1]
                letters[row] = letter.lower() if is_prompt else letter
            columns = [
                (row, query.serial - 1 if query.location is KVLocation.RING else -1, ring.places(row))
                for row, query in ring.held
            ]
            self.steps.append(Step("".join(letters), ring.span, ring.shape.length, columns))

    def lines(self) -> list[str]:
        """A line for each row of the batch, and one of spans."""
        num_rows = max(len(step.letters) for step in self.steps)
        rows = [
            f"row {row}  " + "".join(step.letters.ljust(num_rows)[row] for step in self.steps)
            for row in range(num_rows)
        ]
        spans = "".join(f"{step.span:<{_EVERY}}" for step in self.steps[::_EVERY]).rstrip()
        return [*rows, f"span   {spans}"]


def draw_columns(albums: Mapping[str, Album], path: Path) -> None:
    """Albums side by side: rows of the batch one above the other, a column of the ring a line of pixels.

    Raises OSError.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _INCHES
    figure = Figure(figsize=(width * len(albums), height), layout="constrained")
    FigureCanvasAgg(figure)
    steps = [step for album in albums.values() for step in album.steps]
    length = max(step.length for step in steps)
    num_rows = max(len(step.letters) for step in steps)
    num_steps = max(len(album.steps) for album in albums.values())
    colours = [colour[:3] for colour in colormaps["tab20"](np.arange(20))]
    panels = figure.subplots(1, len(albums), squeeze=False)[0]
    for axes, (title, album) in zip(panels, albums.items(), strict=True):
        pixels = _pixels(album.steps, (num_rows, length, num_steps), colours)
        axes.imshow(pixels, aspect="auto", interpolation="nearest", origin="lower")
        for row in range(1, num_rows):
            axes.axhline(row * length - 0.5, color="black", linewidth=0.8)
        axes.set_yticks([(row + 0.5) * length for row in range(num_rows)], range(num_rows))
        axes.set_title(f"{title}: {len(album.steps)} steps", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel(f"row of the batch, {length} columns of the ring each")
    figure.suptitle("A colour for each query, grey for one that has ended; white is free, or padding")
    figure.savefig(path, dpi=_PIXELS_AN_INCH)


def _pixels(steps: Sequence[Step], sizes: tuple[int, int, int], colours: Sequence[np.ndarray]) -> np.ndarray:
    num_rows, length, num_steps = sizes
    pixels = np.full((num_rows, length, num_steps, 3), _FREE)
    for index, step in enumerate(steps):
        for row, query, places in step.columns:
            pixels[row, places, index] = _ENDED if query < 0 else colours[query % len(colours)]
    return pixels.reshape(num_rows * length, num_steps, 3)
