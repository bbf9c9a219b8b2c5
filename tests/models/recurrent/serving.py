"""An engine of a model with few programs, and requests that arrive while others run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pensieve_jax.cellular import CellOutput, CellularConfig, CellularEngine

BATCH_SIZES = (1, 4)


def small_engine(model: Any) -> CellularEngine:
    """Return an engine with two batch sizes, and launches of one task or two: four programs per cell."""
    cells = [cell._replace(max_batch=BATCH_SIZES[-1], batch_sizes=BATCH_SIZES) for cell in model.cells()]
    config = CellularConfig(num_rows=128, max_num_tasks=2, compile_at_start=True)
    return CellularEngine(cells, model.unfold, config, progress=False)


def served(engine: CellularEngine, requests: Sequence[Any], seed: int) -> list[CellOutput]:
    """Return results in order: a few requests arrive at a time, and some cells run in between."""
    rng = random.Random(seed)
    todo, handles = list(requests), []
    while todo or not all(handle.done for handle in handles):
        num = rng.randint(0, 5)
        handles += engine.submit_many(todo[:num])
        del todo[:num]
        for _ in range(rng.randint(1, 4)):
            engine.wait()
            engine.step()
    return [handle.result() for handle in handles]
