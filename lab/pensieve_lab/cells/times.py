"""Table of cell times.

Owns: the table, its interpolation, and the table of the thesis.
Does not know: which requests wait.
Called by the simulations of cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pensieve_jax.cellular.errors import CellError


@dataclass(frozen=True)
class CellTimes:
    """Times of a model's cells on a device.

    Attributes:
      cells_s: for every cell, by batch size, seconds of one task inside a launch of several.
      overhead_s: by batch size, cost of a task beside its cell, for gathering and scheduling; empty for none.
      launch_s: cost of a launch beside its tasks.
    """

    cells_s: Mapping[str, Mapping[int, float]]
    overhead_s: Mapping[int, float] = field(default_factory=dict)
    launch_s: float = 0.0

    def task_of(self, name: str, batch_size: int) -> float:
        """Return the seconds of a task, linear between batch sizes and proportional beyond the last.

        Raises:
          CellError: the cell was not measured.
        """
        table = self.cells_s.get(name)
        if table is None:
            raise CellError("cell", name, f"one that was measured: {', '.join(self.cells_s)}")
        return _on_line(table, batch_size) + (
            _on_line(self.overhead_s, batch_size) if self.overhead_s else 0.0
        )


def _on_line(table: Mapping[int, float], size: int) -> float:
    sizes = sorted(table)
    if size > sizes[-1]:
        return table[sizes[-1]] * size / sizes[-1]
    return float(np.interp(size, sizes, [table[one] for one in sizes]))


def thesis_v100() -> CellTimes:
    """Return the times of the thesis' V100 at hidden size 1024.

    An LSTM step takes 185 microseconds at batch size 64 and 784 at 512 (section 2.7.3), hardly less below 64,
    and at 512 it has 20% more throughput than at 256 (section 2.7.4). Scheduling and gathering raise 185 to
    250 microseconds, and at 512 they leave 87% of the throughput (section 2.7.3). A decoder step takes three
    times as long as an encoder step, as decoding is 75% of the computation (section 2.7.4).
    """
    step = {1: 185e-6, 64: 185e-6, 256: 470e-6, 512: 784e-6}
    decoder = {size: 3 * one for size, one in step.items()}
    cells = {"lstm": step, "encoder": step, "decoder": decoder, "leaf": step, "inner": step}
    return CellTimes(cells, overhead_s={64: 65e-6, 512: 117e-6})
