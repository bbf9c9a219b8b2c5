"""How long cells take.

Owns: the table, what lies between its lines, and that of the thesis.
Does not know: who waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pensieve_jax.cellular.errors import CellError


@dataclass(frozen=True)
class CellTimes:
    """Of the cells of a model on a device.

    Attributes:
      cells_s: for every cell, by batch size, seconds of one task inside a launch of several.
      overhead_s: what each task costs beside its cell, gathering and scheduling, by batch size; none if
        empty.
      launch_s: what each launch costs beside its tasks.
    """

    cells_s: Mapping[str, Mapping[int, float]]
    overhead_s: Mapping[int, float] = field(default_factory=dict)
    launch_s: float = 0.0

    def task_of(self, name: str, batch_size: int) -> float:
        """Seconds of a task; between two batch sizes on a line, beyond the last in proportion.

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
    """The V100 of the thesis, hidden size 1024.

    An LSTM step takes 185 microseconds at 64 and 784 at 512 (section 2.7.3), hardly less below 64, and at 512
    it has 20% more throughput than at 256 (section 2.7.4). Scheduling and gathering make 250 of these 185,
    and at 512 leave 87% of the throughput (section 2.7.3). A decoder's step takes three times an encoder's,
    as decoding is 75% of the computation (section 2.7.4).
    """
    step = {1: 185e-6, 64: 185e-6, 256: 470e-6, 512: 784e-6}
    decoder = {size: 3 * one for size, one in step.items()}
    cells = {"lstm": step, "encoder": step, "decoder": decoder, "leaf": step, "inner": step}
    return CellTimes(cells, overhead_s={64: 65e-6, 512: 117e-6})
