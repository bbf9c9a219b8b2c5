"""Steps of a padded batch, as text and as a picture of the ring's columns.

Owns: what is recorded of a step, and the drawing.
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
_EVERY = 10  # steps between two numbers in the text line of spans
_FREE, _ENDED = (1.0, 1.0, 1.0), (0.8, 0.8, 0.8)
_INCHES, _PIXELS_AN_INCH = (5.5, 6.5), 100


class Step(NamedTuple):
    """Step of the ring.

    Attributes:
      letters: per row, the letter of the query that got a token; lower case if the step computed its prompt.
      span, length: columns from the first that is needed to the cursor, and all columns.
      columns: per occupied row, (row, query index or -1 if it has ended, columns of its tokens).
    """

    letters: str
    span: int
    length: int
    columns: list[tuple[int, int, np.ndarray]]


class Album:
    """Steps of one engine, recorded as its observer; queries are numbered in order of submission.

    Attributes:
      steps: steps so far.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def observe(self, step: StepSeen) -> None:
        """Record the decode and shaped launches of a step."""
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
        """Return a text line per row of the batch, and one of spans."""
        num_rows = max(len(step.letters) for step in self.steps)
        rows = [
            f"row {row}  " + "".join(step.letters.ljust(num_rows)[row] for step in self.steps)
            for row in range(num_rows)
        ]
        spans = "".join(f"{step.span:<{_EVERY}}" for step in self.steps[::_EVERY]).rstrip()
        return [*rows, f"span   {spans}"]


def draw_columns(albums: Mapping[str, Album], path: Path) -> None:
    """Draw albums side by side: batch rows stacked, one line of pixels per column of the ring.

    Raises OSError if the file cannot be written.
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
    figure.suptitle("One colour per query; grey: its query has ended; white: free or padding")
    figure.savefig(path, dpi=_PIXELS_AN_INCH)


def _pixels(steps: Sequence[Step], sizes: tuple[int, int, int], colours: Sequence[np.ndarray]) -> np.ndarray:
    num_rows, length, num_steps = sizes
    pixels = np.full((num_rows, length, num_steps, 3), _FREE)
    for index, step in enumerate(steps):
        for row, query, places in step.columns:
            pixels[row, places, index] = _ENDED if query < 0 else colours[query % len(colours)]
    return pixels.reshape(num_rows * length, num_steps, 3)
