"""Simulation of points in parallel processes; points are independent.

Owns: the order of results, which is that of the points, and the progress bar.
Does not know: what a point means.
Called by `programs.reproduce`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from pensieve_lab.experiments.point_cache import measure_cached
from pensieve_lab.experiments.points import Measured, Point, measure


def measure_all(
    points: Sequence[Point], *, num_processes: int, keep: Path | None = None, title: str, shown: bool
) -> list[Measured]:
    """Return the figures of all points, the same for any number of processes; show a bar if `shown`.

    Points that the directory `keep` already has are not simulated again.
    """
    measured = measure if keep is None else partial(measure_cached, directory=keep)
    found = _measured(points, measured, num_processes)
    return list(tqdm(found, title, total=len(points), disable=not shown, leave=False))


def _measured(
    points: Sequence[Point], measure: Callable[[Point], Measured], num_processes: int
) -> Iterator[Measured]:
    if num_processes == 1 or len(points) < 2:
        yield from map(measure, points)
        return
    # Spawn, because a fork would copy the threads' locks of libraries in an undefined state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(points)), mp_context=context) as pool:
        yield from pool.map(measure, points)
