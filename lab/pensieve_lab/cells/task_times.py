"""Times of a cell's tasks on a device, in launches of one, two and five, as an engine runs them.

Owns: the launches that are timed.
Does not know: how the times are used, or what baselines take.
Called by the programs of cellular batching.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from pensieve_jax.cellular import CellularEngine
from pensieve_jax.cellular.cells import CellType
from pensieve_jax.cellular.config import TASKS_PER_PROGRAM
from pensieve_jax.cellular.launches import Part
from pensieve_jax.device.row_steps import Timed

UNITS = {
    "task_s": "seconds of one task: time of a launch that follows others / number of its tasks",
    "dispatch_s": "seconds of the host for a launch, including its arguments, while an earlier one runs",
}
_SAMPLES, _LAUNCHES = 5, 40


def task_times(engine: CellularEngine, *, seed: int, shown: bool) -> list[dict[str, Any]]:
    """Return a row for every type, batch size and number of tasks that the engine has compiled."""
    jobs = [
        (kind, size, num)
        for kind in engine.types.types
        for size in kind.batch_sizes
        for num in TASKS_PER_PROGRAM
        if (kind.index, num, size) in engine.workers[0].programs.compiled
    ]
    rows = []
    rng = np.random.default_rng(seed)
    for kind, size, num in tqdm(jobs, "tasks", disable=not shown, leave=False):
        timed = _launches(engine, kind, num, size, rng)
        timed.sample_s(_LAUNCHES)  # the first launches are slower
        taken = [timed.sample_s(_LAUNCHES) / num for _ in range(_SAMPLES)]
        rows.append(
            {
                "cell": kind.name,
                "batch_size": size,
                "num_tasks": num,
                "task_s": statistics.median(taken),
                "task_s_samples": taken,
                "dispatch_s": timed.dispatch_s(_LAUNCHES),
            }
        )
    return rows


def _launches(
    engine: CellularEngine, kind: CellType, num_tasks: int, size: int, rng: np.random.Generator
) -> Timed:
    """Return launches over random rows of the pool; as in chains, a node writes the row that it reads."""
    worker = engine.workers[0]
    num_rows = len(worker.pools[kind.state_kind][0]) - 1
    words = np.zeros((num_tasks, 1 + len(kind.input_kinds) + len(kind.immediates), size), np.int32)
    for task in words:
        task[0] = rng.permutation(num_rows)[:size]
        for slot in range(len(kind.input_kinds)):
            task[1 + slot] = task[0] if slot == 0 else rng.permutation(num_rows)[:size]
        task[1 + len(kind.input_kinds) :] = rng.integers(0, 1000, (len(kind.immediates), size))

    def launch() -> jax.Array:
        return worker.run_part(kind, Part(words))[1]

    return Timed(launch, lambda signal: signal.block_until_ready())
